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
#include "passes/unread.h"

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

  Value* where(Value* condition, Value* x, Value* y) { return make("Where", {condition, x, y}); }
  Value* greater(Value* x, double number) { return make("Greater", {x, constant(number)}); }
  // log(1 + e^x)
  Value* softplus(Value* x) {
    return make("Add", {make("Max", {x, constant(0)}), write_.log1p(write_.decay(x))});
  }

  bool replace(Value* result, size_t output = 0) {
    write_.replace_elements(output, result);
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

// log(1 + e^(beta x)) / beta, and x itself where beta x is above a threshold
bool expand_softplus_of(Graph& graph, Node& node, Value* x, double beta, double threshold) {
  Activation write(graph, node, *x);
  x = write.number(x);
  Value* scaled = write.scaled(x, beta);
  Value* bent = write.scaled(write.softplus(scaled), 1 / beta);
  return write.replace(write.where(write.greater(scaled, threshold), x, bent));
}

bool expand_softplus(Graph& graph, Node& node) {
  constexpr double kThreshold = 20;  // of the operator whose beta is 1
  Value* x = node.inputs[0];
  return is_fusible_float(x) && expand_softplus_of(graph, node, x, 1, kThreshold);
}

bool expand_softplus_call(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const auto beta = ops::as_double(call.args.at(1)), threshold = ops::as_double(call.args.at(2));
  if (!is_fusible_float(x) || !beta || *beta == 0 || !threshold) return false;
  return expand_softplus_of(graph, node, x, *beta, *threshold);
}

// x tanh(log(1 + e^x))
bool expand_mish(Graph& graph, Node& node) {
  if (!is_fusible_float(node.inputs[0])) return false;
  Activation write(graph, node, *node.inputs[0]);
  Value* x = write.number(node.inputs[0]);
  return write.replace(write.make("Mul", {x, write.make("Tanh", {write.softplus(x)})}));
}

// min(x, 0) - log(1 + e^-|x|). The second result is e^-|x|, but nothing on a GPU.
bool expand_log_sigmoid(Graph& graph, Node& node) {
  Value* x = tensor(ops::decode_aten(node).args.at(0));
  if (!is_fusible_float(x)) return false;
  if (is_read(node, 1) && node.outputs[1]->type.shape != x->type.shape) return false;
  Expander write(graph, node, *x);
  x = write.number(x);
  Value* decay = write.decay(x);
  write.replace_elements(0, write.log_sigmoid(x, decay));
  write.replace_elements(1, decay);
  return true;
}

// The operand of a call and the number that comes after it.
struct Numbered {
  Value* x;
  double number;
};

std::optional<Numbered> find_numbered(const Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const std::optional<double> number = ops::as_double(call.args.at(1));
  if (!is_fusible_float(x) || !number) return std::nullopt;
  return Numbered{x, *number};
}

bool expand_hard_shrink(Graph& graph, Node& node) {
  const std::optional<Numbered> of = find_numbered(node);
  if (!of) return false;
  Activation write(graph, node, *of->x);
  Value *x = write.number(of->x), *lambda = write.constant(of->number);
  Value* is_small =
      write.make("And", {write.make("GreaterOrEqual", {x, write.constant(-of->number)}),
                         write.make("LessOrEqual", {x, lambda})});
  return write.replace(write.where(is_small, write.constant(0), x));
}

bool expand_soft_shrink(Graph& graph, Node& node) {
  const std::optional<Numbered> of = find_numbered(node);
  if (!of) return false;
  Activation write(graph, node, *of->x);
  Value *x = write.number(of->x), *lambda = write.constant(of->number);
  Value* zero = write.make("Mul", {x, write.constant(0)});  // with its sign, and NaN stays
  Value* is_low = write.make("Less", {x, write.constant(-of->number)});
  Value* low = write.where(is_low, write.make("Add", {x, lambda}), zero);
  return write.replace(
      write.where(write.greater(x, of->number), write.make("Sub", {x, lambda}), low));
}

bool expand_threshold(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const auto threshold = ops::as_double(call.args.at(1)), value = ops::as_double(call.args.at(2));
  if (!is_fusible_float(x) || !threshold || !value) return false;
  Activation write(graph, node, *x);
  x = write.number(x);
  Value* is_low = write.make("LessOrEqual", {x, write.constant(*threshold)});
  return write.replace(write.where(is_low, write.constant(*value), x));
}

bool expand_prelu(Graph& graph, Node& node) {
  Value *x = node.inputs[0], *slope = node.inputs[1];
  if (!is_fusible_float(x) || !is_fusible_float(slope)) return false;
  if (ops::rank_of(*slope) > ops::rank_of(*x)) return false;
  Activation write(graph, node, *x);
  x = write.number(x);
  Value* low = write.make("Mul", {write.number(slope), x});
  return write.replace(write.where(write.greater(x, 0), x, low));
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
  // NaN is falling, as in PyTorch's vectors.
  return write.replace(write.where(write.greater(x, 0), write.scaled(dy, *scale), falling));
}

// dy, times sigmoid(beta x) up to the threshold
bool expand_softplus_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  const auto beta = of ? of->number(2) : std::nullopt,
             threshold = of ? of->number(3) : std::nullopt;
  if (!beta || !threshold) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *scaled = write.scaled(write.number(of->x), *beta);
  Value* bent = write.make("Mul", {dy, write.make("Sigmoid", {scaled})});
  return write.replace(write.where(write.greater(scaled, *threshold), dy, bent));
}

// With t = tanh(log(1 + e^x)): dy (t + x sigmoid(x) (1 - t t)).
bool expand_mish_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  if (!of) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  Value* t = write.make("Tanh", {write.softplus(x)});
  Value* rest = write.make("Sub", {write.constant(1), write.make("Mul", {t, t})});
  Value* share = write.make("Mul", {x, write.make("Sigmoid", {x})});
  Value* slope = write.make("Add", {t, write.make("Mul", {share, rest})});
  return write.replace(write.make("Mul", {dy, slope}));
}

bool expand_log_sigmoid_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  if (!of) return false;
  Activation write(graph, node, *of->dy);
  Value* share = write.make("Sigmoid", {write.make("Neg", {write.number(of->x)})});
  return write.replace(write.make("Mul", {write.number(of->dy), share}));
}

// No gradient passes where x is NaN, as in PyTorch's vectors.
bool expand_shrink_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  const std::optional<double> lambda = of ? of->number(2) : std::nullopt;
  if (!lambda) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  Value* is_low = write.make("Less", {x, write.constant(-*lambda)});
  Value* passes = write.make("Or", {is_low, write.greater(x, *lambda)});
  return write.replace(write.where(passes, dy, write.constant(0)));
}

bool expand_prelu_grad(Graph& graph, Node& node) {
  const std::optional<Gradient> of = find_gradient(node, 1);
  Value* slope = of ? tensor(of->call.args.at(2)) : nullptr;
  if (slope == nullptr || !is_fusible_float(slope)) return false;
  if (ops::rank_of(*slope) > ops::rank_of(*of->x)) return false;
  Activation write(graph, node, *of->dy);
  Value *dy = write.number(of->dy), *x = write.number(of->x);
  Value* is_high = write.greater(x, 0);
  write.replace(write.where(is_high, dy, write.make("Mul", {write.number(slope), dy})));
  return write.replace(write.where(is_high, write.constant(0), write.make("Mul", {x, dy})), 1);
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
    {"Mish", expand_mish},
    {"PRelu", expand_prelu},
    {"Selu", expand_selu},
    {"Softplus", expand_softplus},
    {ops::aten::kCelu, expand_celu},
    {ops::aten::kEluBackward, expand_elu_grad},
    {ops::aten::kGlu, expand_glu},
    {ops::aten::kGluBackward, expand_glu_grad},
    {ops::aten::kHardShrink, expand_hard_shrink},
    {ops::aten::kHardShrinkBackward, expand_shrink_grad},
    {ops::aten::kHardSigmoidBackward, expand_hard_sigmoid_grad},
    {ops::aten::kHardTanhBackward, expand_hard_tanh_grad},
    {ops::aten::kLogSigmoid, expand_log_sigmoid},
    {ops::aten::kLogSigmoidBackward, expand_log_sigmoid_grad},
    {ops::aten::kMishBackward, expand_mish_grad},
    {ops::aten::kPReluBackward, expand_prelu_grad},
    {ops::aten::kSoftShrink, expand_soft_shrink},
    {ops::aten::kSoftShrinkBackward, expand_shrink_grad},
    {ops::aten::kSoftplus, expand_softplus_call},
    {ops::aten::kSoftplusBackward, expand_softplus_grad},
    {ops::aten::kThreshold, expand_threshold},
};

}  // namespace

std::span<const Expansion> activations() { return kRows; }

}  // namespace torch_ort::passes::composites
