// Activations that have no word of their own, and their gradients. At the ends of their pieces,
// gradients are those of PyTorch's kernels.
#include "ops/activation.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"

#include <optional>

namespace torch_ort::passes::composites {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// The steps of the formulas, of numbers in the dtype that they compute in.
class Activation {
 public:
  Activation(Graph& graph, Node& node, const Value& like) : write_(graph, node, like) {}

  Value* number(Value* x) { return write_.number(x); }
  Value* constant(double number) { return write_.constant(number); }
  Value* scaled(Value* x, double factor) {
    return factor == 1 ? x : make("Mul", {x, constant(factor)});
  }
  Value* make(const char* op, std::vector<Value*> inputs) { return write_.make(op, inputs); }
  Value* clamp(Value* x, double least, double most) {
    return make("Min", {make("Max", {x, constant(least)}), constant(most)});
  }
  // PyTorch's hard sigmoid, in sixths.
  Value* sixths(Value* x) { return clamp(make("Add", {x, constant(3)}), 0, 6); }
  // exp(x) - 1, as 2 t / (1 - t) with t = tanh(x / 2), which keeps the digits of a small x.
  Value* expm1(Value* x) {
    Value* t = make("Tanh", {scaled(x, 0.5)});
    return make("Div", {scaled(t, 2), make("Sub", {constant(1), t})});
  }
  // scale * (x, or alpha * (exp(input_scale * x) - 1) where x is negative)
  Value* elu(Value* x, double alpha, double scale, double input_scale = 1) {
    Value* is_negative = make("Less", {x, constant(0)});
    Value* bent = scaled(expm1(scaled(x, input_scale)), alpha * scale);
    return make("Where", {is_negative, bent, scaled(x, scale)});
  }

  bool replace(Value* result) {
    write_.replace_elements(0, result);
    return true;
  }

 private:
  Expander write_;
};

// ---- forward

bool expand_hard_sigmoid(Graph& graph, Node& node) {
  if (!is_fusible_float(node.inputs[0])) return false;
  Activation write(graph, node, *node.inputs[0]);
  Value* x = write.number(node.inputs[0]);
  const double alpha = ir::float_attr(node.attrs, "alpha", 0.2);
  const double beta = ir::float_attr(node.attrs, "beta", 0.5);
  if (ops::is_pytorchs_hard_sigmoid(alpha, beta)) {
    return write.replace(write.scaled(write.sixths(x), 1.0 / 6));
  }
  Value* line = write.make("Add", {write.scaled(x, alpha), write.constant(beta)});
  return write.replace(write.clamp(line, 0, 1));
}

bool expand_elu(Graph& graph, Node& node) {
  if (!is_fusible_float(node.inputs[0])) return false;
  Activation write(graph, node, *node.inputs[0]);
  return write.replace(
      write.elu(write.number(node.inputs[0]), ir::float_attr(node.attrs, "alpha", 1), 1));
}

bool expand_selu(Graph& graph, Node& node) {
  if (!is_fusible_float(node.inputs[0])) return false;
  Activation write(graph, node, *node.inputs[0]);
  return write.replace(write.elu(write.number(node.inputs[0]),
                                 ir::float_attr(node.attrs, "alpha", ops::kSeluAlpha),
                                 ir::float_attr(node.attrs, "gamma", ops::kSeluScale)));
}

bool expand_celu(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const std::optional<double> alpha = ops::as_double(call.args.at(1));
  if (!is_fusible_float(x) || !alpha || *alpha == 0) return false;
  Activation write(graph, node, *x);
  return write.replace(write.elu(write.number(x), *alpha, 1, 1 / *alpha));
}

// ---- gradients

// The operands of a gradient: that of the result, and what it is computed from.
struct Gradient {
  ops::Call call;
  Value *dy = nullptr, *x = nullptr;

  std::optional<double> number(size_t argument) const {
    return ops::as_double(call.args.at(argument));
  }
};

std::optional<Gradient> find_gradient(const Node& node, size_t of_x) {
  Gradient found{.call = ops::decode_aten(node)};
  found.dy = tensor(found.call.args.at(0));
  found.x = tensor(found.call.args.at(of_x));
  if (!is_fusible_float(found.dy) || !is_fusible_float(found.x)) return std::nullopt;
  return found;
}

bool expand_hard_sigmoid_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  if (!of) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  Value* is_inside = write.make("And", {write.make("Greater", {x, write.constant(-3)}),
                                        write.make("Less", {x, write.constant(3)})});
  return write.replace(
      write.make("Where", {is_inside, write.scaled(dy, 1.0 / 6), write.constant(0)}));
}

bool expand_hard_tanh_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  const auto least = of ? of->number(2) : std::nullopt, most = of ? of->number(3) : std::nullopt;
  if (!least || !most) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  Value* is_outside = write.make("Or", {write.make("LessOrEqual", {x, write.constant(*least)}),
                                        write.make("GreaterOrEqual", {x, write.constant(*most)})});
  return write.replace(write.make("Where", {is_outside, write.constant(0), dy}));
}

bool expand_elu_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 5);
  if (!of) return false;
  const auto alpha = of->number(1), scale = of->number(2), input_scale = of->number(3);
  const auto* is_result = std::get_if<bool>(&of->call.args.at(4).value);
  if (!alpha || !scale || !input_scale || is_result == nullptr) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  const double most = *alpha * *scale;
  Value* slope = *is_result
                     ? write.make("Add", {x, write.constant(most)})
                     : write.scaled(write.make("Exp", {write.scaled(x, *input_scale)}), most);
  Value* falling = write.make("Mul", {dy, write.scaled(slope, *input_scale)});
  Value* is_low = write.make("LessOrEqual", {x, write.constant(0)});
  return write.replace(write.make("Where", {is_low, falling, write.scaled(dy, *scale)}));
}

// ---- gated linear units, of which one half of the input gates the other

struct Gated {
  Value *numbers, *gate;
  int64_t axis;
};

// The halves of `x` along the dim that a call names; nothing if no constant does.
std::optional<Gated> find_gated(Expander& write, const Node& node, Value* x, const ops::Arg& dim) {
  const auto* named = std::get_if<ir::Dim>(&dim.value);
  if (named == nullptr || !named->is_constant()) return std::nullopt;
  const int64_t axis = ops::wrap_axis(node, named->constant(), ops::rank_of(*x));
  const ir::Dim half = ops::floor_div((*x->type.shape)[axis], 2);
  const Node& split = write.add({"", "Split"}, {x, write.ints({half, half})},
                                {ir::Type(), ir::Type()}, {{"axis", ir::Dim(axis)}});
  return Gated{write.number(split.outputs[0]), write.number(split.outputs[1]), axis};
}

bool expand_glu(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  if (!is_fusible_float(x)) return false;
  Expander write(graph, node, *x);
  const std::optional<Gated> of = find_gated(write, node, x, call.args.at(1));
  if (!of) return false;
  write.replace_elements(0, write.make("Mul", {of->numbers, write.make("Sigmoid", {of->gate})}));
  return true;
}

// With s = sigmoid(gate): dy s, and dy numbers s (1 - s).
bool expand_glu_grad(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *dy = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  if (!is_fusible_float(dy) || !is_fusible_float(x)) return false;
  Expander write(graph, node, *x);
  const std::optional<Gated> of = find_gated(write, node, x, call.args.at(2));
  if (!of) return false;
  Value* share = write.make("Sigmoid", {of->gate});
  Value* of_numbers = write.make("Mul", {write.number(dy), share});
  Value* rest = write.make("Sub", {write.constant(1), share});
  Value* of_gate = write.make("Mul", {write.make("Mul", {of_numbers, of->numbers}), rest});
  const ir::DType dtype = node.outputs[0]->type.dtype;
  write.replace(0, write.make("Concat", {write.cast(of_numbers, dtype), write.cast(of_gate, dtype)},
                              {{"axis", ir::Dim(of->axis)}}));
  return true;
}

constexpr Expansion kRows[] = {
    {"Elu", expand_elu},
    {"HardSigmoid", expand_hard_sigmoid},
    {"Selu", expand_selu},
    {ops::aten::kCelu, expand_celu},
    {ops::aten::kEluBackward, expand_elu_grad},
    {ops::aten::kGlu, expand_glu},
    {ops::aten::kGluBackward, expand_glu_grad},
    {ops::aten::kHardSigmoidBackward, expand_hard_sigmoid_grad},
    {ops::aten::kHardTanhBackward, expand_hard_tanh_grad},
};

}  // namespace

std::span<const Expansion> activations() { return kRows; }

}  // namespace torch_ort::passes::composites
