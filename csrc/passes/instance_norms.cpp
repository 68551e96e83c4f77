// Batch norm over images of one channel each, and its gradient -> group norm with groups of one
// channel
//
//   x1 = Reshape(x)                          (1, N*C, H, W)
//   y1, mean1, rstd1 = _native_batch_norm_legit.no_stats(x1, Tile(weight), Tile(bias))
//   y = Reshape(y1)                          (N, C, H, W)
//
//   y, mean, rstd = native_group_norm(x, weight, bias, N, C, H*W, C)
//
// PyTorch computes instance norms in the first form, for inputs of any rank. It hides images from
// passes that choose layouts, and its kernels get parameters that are repeated for each image. The
// second form is expanded into regions (composites/group_norm.cpp). Declines short floats, whose
// statistics have another dtype in the second form, and running statistics.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/unread.h"

#include <algorithm>
#include <optional>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

bool has_shape(const Value* value, const Shape& shape) {
  return value != nullptr && value->type.is_known() && *value->type.shape == shape;
}

// Images (N, C, ...), and their shape where those of a batch are channels of one image. It is the
// same for one image.
struct Images {
  Value* x;
  Shape shape, merged;

  Dim batch() const { return shape[0]; }
  Dim channels() const { return shape[1]; }
  Dim numbers() const { return merged[1]; }
  bool is_one() const { return batch() == Dim(1); }
  Shape of_channels() const { return {shape[0], shape[1]}; }
};

// What a view with merged images is made of; nothing if it is no such view, or if PyTorch's kernel
// of the other form would be asked for another layout or dtype than it has.
std::optional<Images> find_images(Value* merged) {
  if (merged == nullptr || !merged->type.is_known()) return std::nullopt;
  Value* x = ir::is(merged->producer, "Reshape") ? merged->producer->inputs[0] : merged;
  if (!x->type.is_known() || x->type.strides || x->type.shape->size() < 3) return std::nullopt;
  if (x->type.dtype != DType::kFloat && x->type.dtype != DType::kDouble) return std::nullopt;
  Images found{x, *x->type.shape, *x->type.shape};
  found.merged[0] = 1;
  found.merged[1] = ops::times(found.batch(), found.channels());
  if (!found.channels().is_constant() || !has_shape(merged, found.merged)) return std::nullopt;
  return found;
}

// A parameter of all channels that is repeated for each image, without the repetition; nothing if
// it is something else. nullptr stands for a parameter that is not given.
std::optional<Value*> find_parameter(Value* repeated, const Images& images) {
  if (repeated == nullptr) return nullptr;
  const Shape one = {images.channels()}, all = {images.numbers()};
  if (!has_shape(repeated, all) || repeated->type.dtype != images.x->type.dtype) {
    return std::nullopt;
  }
  if (images.is_one()) return repeated;
  if (!ir::is(repeated->producer, "Tile")) return std::nullopt;
  Value* parameter = repeated->producer->inputs[0];
  return has_shape(parameter, one) ? std::optional(parameter) : std::nullopt;
}

class Rewriter {
 public:
  explicit Rewriter(Graph& graph) : graph_(graph) {}

  int run(PassContext& context) {
    int rewrites = 0;
    std::vector<Node*> operands;  // of the nodes that are replaced, in their order
    for (Node& node : graph_.nodes) {
      const std::string kind = node.is_erased() ? "" : kind_of(node);
      const bool is_forward = kind == ops::aten::kBatchNormWithoutStatistics;
      if (!is_forward && kind != ops::aten::kBatchNormBackward) continue;
      if (!context.may_rewrite()) break;
      if (is_forward ? rewrite_forward(node) : rewrite_backward(node)) {
        for (const Value* input : node.inputs) {
          Node* maker = input == nullptr ? nullptr : input->producer;
          if (ir::is(maker, "Reshape") || ir::is(maker, "Tile")) operands.push_back(maker);
        }
        ir::erase(graph_, node);
        ++rewrites;
      } else {
        context.did_not_rewrite();
      }
    }
    // A view that nothing reads would count as a reader of its images.
    erase_unread(graph_, operands);
    return rewrites;
  }

 private:
  bool rewrite_forward(Node& node) {
    const ops::Call call = ops::decode_aten(node);
    if (call.overload != "no_stats") return false;
    const std::optional<Images> images = find_images(tensor(call.args.at(0)));
    const auto* training = std::get_if<bool>(&call.args.at(3).value);
    const auto* epsilon = std::get_if<double>(&call.args.at(5).value);
    if (!images || training == nullptr || !*training || epsilon == nullptr ||
        node.outputs[0] == nullptr) {
      return false;
    }
    const auto weight = find_parameter(tensor(call.args.at(1)), *images),
               bias = find_parameter(tensor(call.args.at(2)), *images);
    if (!weight || !bias) return false;
    ops::Writer write(graph_, &node);
    const Type statistic = ops::with_shape(images->x->type, images->of_channels());
    const Node& made = add(write, node, *images, ops::aten::kGroupNorm,
                           {{"input", images->x}, {"weight", *weight}, {"bias", *bias}},
                           {images->x->type, statistic, statistic}, {{"eps", *epsilon}});
    replace_images(write, *node.outputs[0], *made.outputs[0], *images);
    for (size_t i : {1, 2}) {
      if (!is_read(node, i)) continue;
      Value* merged = write.reshape(made.outputs[i], {images->numbers()});
      ir::replace_uses(*node.outputs[i], *merged, graph_);
    }
    return true;
  }

  bool rewrite_backward(Node& node) {
    const ops::Call call = ops::decode_aten(node);
    Value* const gradient = tensor(call.args.at(0));
    const std::optional<Images> images = find_images(tensor(call.args.at(1)));
    const auto* training = std::get_if<bool>(&call.args.at(7).value);
    if (!images || !has_shape(gradient, images->merged) || gradient->type.strides ||
        training == nullptr || !*training || tensor(call.args.at(3)) != nullptr) {
      return false;
    }
    const auto weight = find_parameter(tensor(call.args.at(2)), *images);
    Value *const mean = tensor(call.args.at(5)), *const rstd = tensor(call.args.at(6));
    for (const Value* each : {mean, rstd}) {
      const bool fits = has_shape(each, {images->numbers()}) &&
                        each->type.dtype == images->x->type.dtype && !each->type.strides;
      if (!fits) return false;
    }
    if (!weight || !is_summed_over_images(node, 1, *images) ||
        !is_summed_over_images(node, 2, *images)) {
      return false;
    }
    ops::Writer write(graph_, &node);
    Value* dy = without_view(write, *gradient, images->shape);
    Value* means = without_view(write, *mean, images->of_channels());
    Value* rstds = without_view(write, *rstd, images->of_channels());
    std::vector<std::string> mask;
    std::vector<Type> types = {images->x->type};
    types.resize(3, ops::with_shape(images->x->type, Shape{images->channels()}));
    for (size_t i : {0, 1, 2}) {
      mask.emplace_back(is_read(node, i) ? "true" : "false");
      if (!is_read(node, i)) types[i] = Type{.device = images->x->type.device};
    }
    const Node& made = add(write, node, *images, ops::aten::kGroupNormBackward,
                           {{"grad_out", dy},
                            {"input", images->x},
                            {"mean", means},
                            {"rstd", rstds},
                            {"weight", *weight}},
                           types, {{"output_mask", mask}});
    if (is_read(node, 0)) replace_images(write, *node.outputs[0], *made.outputs[0], *images);
    for (size_t i : {1, 2}) {
      if (!is_read(node, i)) continue;
      if (images->is_one()) {
        ir::replace_uses(*node.outputs[i], *made.outputs[i], graph_);
      } else {
        replace_sums(*node.outputs[i], *made.outputs[i]);
      }
    }
    return true;
  }

  struct Operand {
    const char* name;
    Value* value;
  };

  // Adds a call with the name of the node that it replaces.
  static Node& add(ops::Writer& write, const Node& node, const Images& images, const char* op,
                   const std::vector<Operand>& operands, const std::vector<Type>& types,
                   ir::Attrs attrs) {
    std::vector<Value*> inputs;
    std::vector<std::string> names;
    for (const auto& [name, value] : operands) {
      if (value == nullptr) continue;
      inputs.push_back(value);
      names.emplace_back(name);
    }
    const Dim inner = ir::numel(Shape(images.shape.begin() + 2, images.shape.end()));
    attrs.insert({{"operator", std::string(op)},
                  {"overload_name", std::string()},
                  {"tensor_args", names},
                  {"N", images.batch()},
                  {"C", images.channels()},
                  {"HxW", inner},
                  {"group", images.channels()}});
    return write.add_named(node.name, {ir::kAtenDomain, "ATen"}, std::move(inputs), types,
                           std::move(attrs));
  }

  static Value* without_view(ops::Writer& write, Value& value, const Shape& shape) {
    if (has_shape(&value, shape)) return &value;
    if (ir::is(value.producer, "Reshape")) {
      Value* from = value.producer->inputs[0];
      if (has_shape(from, shape) && !from->type.strides) return from;
    }
    return write.reshape(&value, shape);
  }

  // Readers that divide the merged images again read `made` itself.
  void replace_images(ops::Writer& write, Value& old, Value& made, const Images& images) {
    const std::vector<ir::Use> uses = old.uses;
    for (const ir::Use& use : uses) {
      if (!ir::is(use.node, "Reshape") || use.index != 0 ||
          !has_shape(use.node->outputs[0], images.shape)) {
        continue;
      }
      ir::replace_uses(*use.node->outputs[0], made, graph_);
      ir::erase(graph_, *use.node);
    }
    if (old.uses.empty()) return;
    Value* merged = images.is_one() ? &made : write.reshape(&made, images.merged);
    ir::replace_uses(old, *merged, graph_);
  }

  // Whether all that reads an output, if anything does, is its sum over the images.
  static bool is_summed_over_images(const Node& node, size_t output, const Images& images) {
    if (!is_read(node, output) || images.is_one()) return true;
    const auto& uses = node.outputs[output]->uses;
    return std::all_of(uses.begin(), uses.end(), [&](const ir::Use& use) {
      return ir::is(use.node, "Reshape") && use.index == 0 &&
             has_shape(use.node->outputs[0], images.of_channels()) &&
             is_sum_of_images(*use.node->outputs[0]);
    });
  }

  static bool is_sum_of_images(const Value& numbers) {
    return std::all_of(numbers.uses.begin(), numbers.uses.end(), [](const ir::Use& use) {
      if (!ir::is(use.node, "ReduceSum") || use.index != 0) return false;
      return ops::reduction_axes(*use.node) == std::vector<int64_t>{0} &&
             ir::int_attr(use.node->attrs, "keepdims", 1) == 0;
    });
  }

  void replace_sums(Value& old, Value& made) {
    const std::vector<ir::Use> views = old.uses;
    for (const ir::Use& view : views) {
      const std::vector<ir::Use> sums = view.node->outputs[0]->uses;
      for (const ir::Use& sum : sums) {
        ir::replace_uses(*sum.node->outputs[0], made, graph_);
        ir::erase(graph_, *sum.node);
      }
      ir::erase(graph_, *view.node);
    }
  }

  Graph& graph_;
};

}  // namespace

int instance_norms(Graph& graph, PassContext& context) { return Rewriter(graph).run(context); }

}  // namespace torch_ort::passes
