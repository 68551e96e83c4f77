#include "passes/layouts.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/known_sizes.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// Whether the elements of the result are in memory in the order of those of an operand.
bool follows(const Node& node) { return ops::is_view(node) || ir::is(&node, "Concat"); }

// Whether the result is written in the order that its type states.
bool has_own_layout(const Node& node, const Value& output) {
  if (ops::is_view(node)) return false;
  if (ir::is(&node, "SliceScatter", ir::kTorchOrtDomain)) return true;
  return !output.type.strides || ops::fused_form(node).kind == ops::FusedForm::Kind::kPointwise;
}

bool counts_on_strides(const ir::Use& use) {
  if (use.node == nullptr || use.index == ir::kCaptured) return true;
  const std::string& domain = use.node->op.domain;
  return !domain.empty() && domain != ir::kTorchOrtDomain;
}

// Whether it is known of an operator of PyTorch that its numbers do not depend on strides.
bool finds_by_index(const Node& node) {
  if (ops::fused_form(node).kind != ops::FusedForm::Kind::kNone) return true;
  const std::string key = ops::key_of(node);
  for (const char* each :
       {ops::aten::kLayerNorm, ops::aten::kLayerNormBackward, ops::aten::kLogSoftmaxBackward,
        ops::aten::kRmsNorm, ops::aten::kRmsNormBackward, ops::aten::kSoftmaxBackward}) {
    if (key == each) return true;
  }
  return false;
}

bool is_image_of_kernel(const ir::Use& use) {
  if (use.node == nullptr) return false;
  const ops::ImageForm form = ops::image_form(*use.node);
  return form.kind == ops::ImageForm::Kind::kKernel &&
         std::find(form.inputs.begin(), form.inputs.end(), use.index) != form.inputs.end();
}

bool has_quotient(const Dim& dim) {
  if (dim.is_constant() || dim.is_symbol()) return false;
  if (dim.op() != ir::DimOp::kAdd && dim.op() != ir::DimOp::kSub && dim.op() != ir::DimOp::kMul) {
    return true;
  }
  return has_quotient(dim.lhs()) || has_quotient(dim.rhs());
}

// Where a view divides a dim the quotient is exact, so N // 2 * 2 equals N. A graph does not know
// this, because it follows from guards of the capture. So dims with quotients are compared by their
// values in the captured call.
bool are_equal(const ir::Graph& graph, const Dim& a, const Dim& b) {
  if (a == b) return true;
  if (!has_quotient(a) && !has_quotient(b)) return false;
  const std::optional<int64_t> value = hinted_size(graph, a);
  return value && value == hinted_size(graph, b);
}

// Whether both types place every element in the same way, as far as the types are known.
bool have_same_places(const ir::Graph& graph, const Type& a, const Type& b) {
  if (!a.is_known() || !b.is_known() || !(*a.shape == *b.shape)) return true;
  const Shape &shape = *a.shape, of_a = ops::strides_of(a), of_b = ops::strides_of(b);
  if (ir::numel(shape) == Dim(0)) return true;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (!(shape[i] == Dim(1)) && !are_equal(graph, of_a[i], of_b[i])) return false;
  }
  return true;
}

// The dims of size above 1 in the captured call, from the outermost to the innermost. Nothing if
// sizes are not known, or if several elements share a place.
std::optional<std::vector<size_t>> order_of_dims(const ir::Graph& graph, const Type& type) {
  const Shape strides = ops::strides_of(type);
  std::vector<std::pair<int64_t, size_t>> dims;
  for (size_t i = 0; i < strides.size(); ++i) {
    const auto size = hinted_size(graph, (*type.shape)[i]), stride = hinted_size(graph, strides[i]);
    if (!size || !stride || (*size > 1 && *stride == 0)) return std::nullopt;
    if (*size > 1) dims.emplace_back(-*stride, i);
  }
  std::sort(dims.begin(), dims.end());
  std::vector<size_t> order;
  for (const auto& [stride, dim] : dims) order.push_back(dim);
  return order;
}

// Point-wise operators of PyTorch give results with the dims in the order of their operands, but
// never with gaps. So they do not depend on gaps.
bool counts_on_gaps(const ir::Use& use) {
  return use.node == nullptr || use.index == ir::kCaptured ||
         ops::fused_form(*use.node).kind != ops::FusedForm::Kind::kPointwise;
}

bool have_same_order_of_dims(const ir::Graph& graph, const Type& a, const Type& b) {
  if (!a.is_known() || !b.is_known() || !(*a.shape == *b.shape)) return false;
  const auto order = order_of_dims(graph, a);
  return order && order == order_of_dims(graph, b);
}

std::string reader_of(const ir::Use& use) {
  return use.node == nullptr ? concat("output ", use.index) : concat("node '", use.node->name, "'");
}

// The types that the op of a node infers; none if the op has no shape rule, or if data decides the
// types.
std::vector<Type> inferred_types(const ir::Graph& graph, const Node& node) {
  const ops::Op* op = ops::registry().find(node.op);
  const bool is_older = graph.opset > 0 && ops::first_opset(node) > graph.opset;
  if (op == nullptr || op->infer == nullptr || is_older) return {};
  try {
    return op->infer(node);
  } catch (const Unsupported&) {
    return {};
  }
}

std::string strides_text(const Type& type) { return ir::to_string(ops::strides_of(type)); }

void verify_view(const ir::Graph& graph, const Node& node, std::string_view pass) {
  const std::vector<Type> types = inferred_types(graph, node);
  for (size_t i = 0; i < std::min(types.size(), node.outputs.size()); ++i) {
    const Value* view = node.outputs[i];
    if (view == nullptr) continue;
    ORT_CHECK(have_same_places(graph, types[i], view->type), "verify after ", pass, ": view '",
              view->name, "': got strides ", strides_text(view->type), ", want ",
              strides_text(types[i]));
  }
}

}  // namespace

bool takes_any_layout(const ir::Use& use) {
  if (counts_on_strides(use)) return false;
  const Node& node = *use.node;
  return std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* output) {
    if (output == nullptr || has_own_layout(node, *output)) return true;
    return follows(node) && takes_any_layout(*output);
  });
}

bool takes_any_layout(const Value& value) {
  return std::all_of(value.uses.begin(), value.uses.end(),
                     [](const ir::Use& use) { return takes_any_layout(use); });
}

bool takes_row_major(const ir::Use& use) {
  if (!counts_on_strides(use)) return true;
  if (use.node == nullptr || use.index == ir::kCaptured || !finds_by_index(*use.node)) return false;
  return std::all_of(use.node->outputs.begin(), use.node->outputs.end(), [](const Value* output) {
    return output == nullptr || output->uses.empty() ||
           (output->type.is_known() && !output->type.strides);
  });
}

void follow_layout(Value& value) {
  for (const ir::Use& use : value.uses) follow_layout(*use.node);
}

void follow_layout(Node& reader) {
  for (Value* output : reader.outputs) {
    if (output == nullptr || has_own_layout(reader, *output)) continue;
    output->type.strides.reset();
    ops::infer_types(reader);
    follow_layout(*output);
  }
}

CountedStrides::CountedStrides(const ir::Graph& graph) {
  for (const Value& value : graph.values) note(value);
}

void CountedStrides::note(const Value& value) {
  for (const ir::Use& use : value.uses) {
    if (!counts_on_strides(use) || is_image_of_kernel(use)) continue;
    seen_[{use.node, use.index}] = {reader_of(use), value.type};
  }
}

void CountedStrides::verify(const ir::Graph& graph, std::string_view pass) const {
  for (const Node& node : graph.nodes) {
    if (!node.is_erased() && ops::is_view(node)) verify_view(graph, node, pass);
  }
  for (const Value& value : graph.values) {
    for (const ir::Use& use : value.uses) {
      const auto seen = seen_.find({use.node, use.index});
      if (seen == seen_.end() || seen->second.reader != reader_of(use)) continue;
      const Type& before = seen->second.type;
      const bool is_same =
          have_same_places(graph, before, value.type) ||
          (!value.type.strides && takes_row_major(use)) ||
          (!counts_on_gaps(use) && have_same_order_of_dims(graph, before, value.type));
      ORT_CHECK(is_same, "verify after ", pass, ": ", reader_of(use), " counts on the strides of '",
                value.name, "': got ", strides_text(value.type), ", want ", strides_text(before));
    }
  }
}

}  // namespace torch_ort::passes
