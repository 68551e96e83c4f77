// x[:, places]                          -> torch_ort.Take(x, places)
// its gradient, summed into zeros       -> torch_ort.TakeGrad(gradient, places)
//
// Declines if several dims are indexed, if sizes are unbacked, and if PyTorch's kernels are as
// fast.
//
// On CUDA only gradients are rewritten, all of them. Taking writes each element once there, by any
// kernel: PyTorch's reads and writes as many bytes as one of the engine could. To sum into zeros
// it sorts 64-bit ids in memory that it allocates (index_put), or adds by atomics, so that no two
// runs have the same bits (index_add). The engine's kernels sort as well, and write each element
// once, in an order that repeats.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/creation.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/sorted_sums.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "region/codegen.h"

#include <algorithm>
#include <optional>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// Parts of `x` at places along one dim; or the gradient of such parts, which is summed into zeros.
struct Taken {
  Value* x;  // what parts are taken of, or the gradient of the parts
  Value* places;
  int64_t axis;
  bool from_end;  // negative places count from the end
  bool is_gradient;
  bool is_left_to_cpu = false;  // PyTorch has a kernel for it on the CPU
};

// Whether all bytes are 0: a ConstantOfShape, a constant that it was folded into, or what PyTorch
// makes on a GPU.
bool is_zeros(const Value& value) {
  if (value.producer != nullptr && ops::fills_with_zeros(*value.producer)) return true;
  std::shared_ptr<const ir::TensorData> data;
  if (ir::is(value.producer, "ConstantOfShape")) {
    const auto fill = value.producer->attrs.find("value");
    if (fill == value.producer->attrs.end()) return true;
    data = std::get<std::shared_ptr<const ir::TensorData>>(fill->second);
  } else if (value.producer == nullptr) {
    data = value.data;
  }
  if (data == nullptr || data->bytes == nullptr) return false;
  return std::all_of(data->bytes, data->bytes + data->num_bytes,
                     [](std::byte each) { return each == std::byte(0); });
}

// The only tensor among the indices, and the dim that it indexes.
std::optional<std::pair<Value*, int64_t>> only_places(const ops::Arg& indices) {
  const auto& list = std::get<ops::ArgList>(indices.value);
  std::optional<std::pair<Value*, int64_t>> found;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].is_none()) continue;
    if (found || tensor(list[i]) == nullptr) return std::nullopt;
    found.emplace(tensor(list[i]), static_cast<int64_t>(i));
  }
  return found;
}

std::optional<Taken> index(const Node& node) {
  const ops::Call call = ops::decode_aten(node);
  if (call.overload != "Tensor") return std::nullopt;
  const auto found = only_places(call.args.at(1));
  if (!found) return std::nullopt;
  return Taken{tensor(call.args.at(0)), found->first, found->second, true, false};
}

std::optional<Taken> index_put(const Node& node) {
  const ops::Call call = ops::decode_aten(node);
  const auto* adds = std::get_if<bool>(&call.args.at(3).value);
  if (!call.overload.empty() || adds == nullptr || !*adds) return std::nullopt;
  const auto found = only_places(call.args.at(1));
  const Value* base = tensor(call.args.at(0));
  if (!found || base == nullptr || !is_zeros(*base)) return std::nullopt;
  return Taken{tensor(call.args.at(2)), found->first, found->second, true, true};
}

// Index_select, which the conversion writes as a Gather.
std::optional<Taken> gather(const Node& node) {
  const Value &x = ops::input(node, 0), &places = ops::input(node, 1);
  const bool is_view = !places.type.shape || places.type.shape->empty();
  if (is_view || !x.type.shape) return std::nullopt;
  const auto rank = static_cast<int64_t>(x.type.shape->size());
  const int64_t axis = ops::wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank);
  // Regions read rows of a table in place. Along the second dim, PyTorch is as fast for runs of
  // elements, and for single elements of four bytes or more.
  const bool is_slow = axis > 1 || (axis == 1 && rank == 2 && ir::size_bytes(x.type.dtype) < 4);
  if (!is_slow) return std::nullopt;
  return Taken{node.inputs[0], node.inputs[1], axis, false, false};
}

std::optional<Taken> index_add(const Node& node) {
  const ops::Call call = ops::decode_aten(node);
  const Value *base = tensor(call.args.at(0)), *places = tensor(call.args.at(2));
  const auto* axis = std::get_if<Dim>(&call.args.at(1).value);
  const auto* alpha = std::get_if<Dim>(&call.args.at(4).value);
  const bool is_plain = call.overload.empty() && base != nullptr && places != nullptr &&
                        axis != nullptr && axis->is_constant() && alpha != nullptr &&
                        *alpha == Dim(1);
  if (!is_plain || !base->type.shape || base->type.shape->empty() || !is_zeros(*base)) return {};
  if (!places->type.shape || places->type.shape->size() != 1) return std::nullopt;
  const auto rank = static_cast<int64_t>(base->type.shape->size());
  const int64_t at = ops::wrap_axis(node, axis->constant(), rank);
  const bool has_single_elements = at == rank - 1;
  return Taken{tensor(call.args.at(3)), tensor(call.args.at(2)), at, false, true,
               has_single_elements};
}

struct Form {
  const char* op;  // a standard op, or the operator of an ATen node
  std::optional<Taken> (*read)(const Node& node);
  // Set where PyTorch's kernel raises another error than ours for places that do not exist. In the
  // backward half places are valid, because the forward half has read them.
  bool only_backward = false;
};

constexpr Form kForms[] = {
    {"Gather", gather},
    {ops::aten::kIndex, index},
    {ops::aten::kIndexAdd, index_add, true},
    {ops::aten::kIndexPut, index_put},
};

const Form* find_form(const Node& node) {
  if (node.is_erased()) return nullptr;
  const std::string key = ops::key_of(node);
  const auto* found = std::find_if(std::begin(kForms), std::end(kForms),
                                   [&](const Form& form) { return key == form.op; });
  return found == std::end(kForms) ? nullptr : found;
}

std::optional<int64_t> hinted_count(const Graph& graph, const Value& value) {
  return hinted_size(graph, ir::numel(*value.type.shape));
}

// Whether kernels sort the places of a gradient, in a workspace.
bool is_sorted(const Taken& taken, const Value& result) {
  if (!taken.is_gradient) return false;
  const region::KernelRow* kernel = region::kernel_for(&result, "TakeGrad");
  return kernel != nullptr && kernel->sorts_ids;
}

// Of the CPU. Sums of short floats are made in float32, in memory beside the result. PyTorch's
// kernel adds in the result itself. That is much faster if few rows of the result are not zero, or
// if the memory beside it has room for only a few rows.
bool is_slow(const Graph& graph, const Taken& taken, const Value& result) {
  if (is_sorted(taken, result)) return false;
  if (taken.is_left_to_cpu) return true;
  if (!taken.is_gradient || ir::size_bytes(result.type.dtype) >= 4) return false;
  if (result.type.shape->size() == 1) return true;
  const std::optional<int64_t> whole = hinted_count(graph, result);
  const std::optional<int64_t> parts = hinted_count(graph, *taken.x);
  return taken.axis == 0 && (!whole || !parts || *whole > 8 * *parts);
}

bool can_take(const Taken& taken, const Node& node, const KnownSizes& sizes) {
  const Value* result = node.outputs.at(0);
  for (const Value* value : {static_cast<const Value*>(taken.x), result}) {
    const char* op = taken.is_gradient ? "TakeGrad" : "Take";
    if (!region::has_kernel(value, op) || !sizes.are_known(*value)) return false;
  }
  if (taken.is_gradient && !ir::is_float(result->type.dtype)) return false;
  if (taken.places == nullptr || !taken.places->type.is_known()) return false;
  const ir::Type& places = taken.places->type;
  if (places.dtype != DType::kInt64 && places.dtype != DType::kInt32) return false;
  if (!sizes.are_known(*taken.places) || !(places.device == result->type.device)) return false;
  // The sizes differ if index_put broadcasts the values.
  const Value &whole = taken.is_gradient ? *result : *taken.x,
              &parts = taken.is_gradient ? *taken.x : *result;
  Shape shape = *whole.type.shape;
  if (taken.axis >= static_cast<int64_t>(shape.size())) return false;
  shape.erase(shape.begin() + taken.axis);
  shape.insert(shape.begin() + taken.axis, places.shape->begin(), places.shape->end());
  return shape == *parts.type.shape && parts.type.dtype == whole.type.dtype;
}

}  // namespace

int take_places(Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  const std::unordered_set<const Node*> backward = backward_nodes(graph);
  for (Node& node : graph.nodes) {
    const Form* form = find_form(node);
    if (form == nullptr || (form->only_backward && !backward.contains(&node))) continue;
    const std::optional<Taken> taken = form->read(node);
    if (!taken || !can_take(*taken, node, sizes)) continue;
    if (is_slow(graph, *taken, *node.outputs[0])) continue;
    if (!context.may_rewrite()) return rewrites;
    Value& old = *node.outputs[0];
    std::vector<ir::Type> types = {old.type};
    if (is_sorted(*taken, old)) {
      const Dim num_ids = ir::numel(*taken->places->type.shape);
      types.push_back(ops::sorted_sums_workspace(num_ids, old.type, taken->axis));
    }
    const Node& made = ops::Writer(graph, &node)
                           .add({ir::kTorchOrtDomain, taken->is_gradient ? "TakeGrad" : "Take"},
                                {taken->x, taken->places}, types,
                                {{"axis", Dim(taken->axis)}, {"from_end", Dim(taken->from_end)}});
    ir::replace_uses(old, *made.outputs[0], graph);
    ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
