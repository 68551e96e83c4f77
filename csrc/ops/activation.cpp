// Activation functions with a shape of their own; relu, tanh and sigmoid are in elementwise.cpp.
#include "ops/activation.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/broadcast.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <cmath>
#include <numbers>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Node;
using ir::Type;
using ir::Value;
using enum AttrKind;

void lower_gelu(const Node& node, CallList& calls) {
  const std::string kind = ir::string_attr(node.attrs, "approximate", "none");
  if (kind != "none" && kind != "tanh") {
    throw UserError(concat("Gelu: approximate: got '", kind, "', want 'none' or 'tanh'"));
  }
  lower_pair(node, calls);
}

// x * sigmoid(alpha * x)
void lower_swish(const Node& node, CallList& calls) {
  Value* x = node.inputs[0];
  const double alpha = ir::float_attr(node.attrs, "alpha", 1.0);
  if (alpha == 1.0) return lower_pair(node, calls);
  Value* scaled = calls.temporary(with_shape(x->type, x->type.shape));
  Value* gate = calls.temporary(with_shape(x->type, x->type.shape));
  calls.add("aten::mul", "Scalar", {x, alpha}, {scaled});
  calls.add("aten::sigmoid", "", {scaled}, {gate});
  calls.add("aten::mul", "Tensor", {x, gate}, {node.outputs[0]});
}

// x / (1 + |x|)
void lower_softsign(const Node& node, CallList& calls) {
  Value* x = node.inputs[0];
  Value* size = calls.temporary(with_shape(x->type, x->type.shape));
  Value* divisor = calls.temporary(with_shape(x->type, x->type.shape));
  calls.add("aten::abs", "", {x}, {size});
  calls.add("aten::add", "Scalar", {size, 1, 1}, {divisor});
  calls.add("aten::div", "Tensor", {x, divisor}, {node.outputs[0]});
}

// max(0, min(1, alpha * x + beta))
void lower_hard_sigmoid(const Node& node, CallList& calls) {
  Value* x = node.inputs[0];
  const double alpha = ir::float_attr(node.attrs, "alpha", 0.2);
  const double beta = ir::float_attr(node.attrs, "beta", 0.5);
  if (is_pytorchs_hard_sigmoid(alpha, beta)) return lower_pair(node, calls);
  Value* scaled = calls.temporary(with_shape(x->type, x->type.shape));
  Value* moved = calls.temporary(with_shape(x->type, x->type.shape));
  calls.add("aten::mul", "Scalar", {x, alpha}, {scaled});
  calls.add("aten::add", "Scalar", {scaled, beta, 1}, {moved});
  calls.add("aten::clamp", "", {moved, 0.0, 1.0}, {node.outputs[0]});
}

// The slope broadcasts to the input. The input does not broadcast to the slope.
std::vector<Type> infer_prelu(const Node& node) {
  want_same_dtype(node, {0, 1});
  return infer_like_first(node);
}

void lower_prelu(const Node& node, CallList& calls) {
  calls.add("aten::_prelu_kernel", "", {node.inputs[0], &input(node, 1)}, {node.outputs[0]});
}

FusedForm fused_gelu(const Node& node) {
  const bool is_tanh = ir::string_attr(node.attrs, "approximate", "none") == "tanh";
  return pointwise_form(node, is_tanh ? Pointwise::kGeluTanh : Pointwise::kGelu);
}

FusedForm fused_gelu_grad(const Node& node) {
  const bool is_tanh = ir::string_attr(node.attrs, "approximate", "none") == "tanh";
  return pointwise_form(node, is_tanh ? Pointwise::kGeluTanhGrad : Pointwise::kGeluGrad);
}

FusedForm fused_swish(const Node& node) {
  if (ir::float_attr(node.attrs, "alpha", 1) != 1) return {};
  return pointwise_form(node, Pointwise::kSilu);
}

// The form of an operator whose arguments are a gradient, an input and a number.
FusedForm fused_grad_by_number(const Node& node, Pointwise op) {
  const std::optional<double> number = as_double(decode_aten(node).args.at(2));
  return number ? pointwise_form(node, op, {*number}) : FusedForm();
}

FusedForm fused_threshold_grad(const Node& node) {
  return fused_grad_by_number(node, Pointwise::kThresholdGrad);
}

FusedForm fused_leaky_relu(const Node& node) {
  return pointwise_form(node, Pointwise::kLeakyRelu, {ir::float_attr(node.attrs, "alpha", 0.01)});
}

// PyTorch requires a slope that is not negative. Then the result has the sign of the input, so that
// the gradient may be computed from either.
FusedForm fused_leaky_relu_grad(const Node& node) {
  return fused_grad_by_number(node, Pointwise::kLeakyReluGrad);
}

// Above its threshold PyTorch's softplus returns x. In float64 this differs from the function.
bool is_narrow_float(ir::DType dtype) { return ir::is_float(dtype) && dtype != ir::DType::kDouble; }

Op activation(std::string name, int since, int bfloat16_since, Pair pair,
              std::vector<AttrRule> attributes = {}, Lowering lower = lower_pair,
              FusedRule fused = {}) {
  Op op;
  op.name = std::move(name);
  op.attributes = std::move(attributes);
  op.since = since;
  op.bfloat16_since = bfloat16_since;
  if (pair.accepts == nullptr) pair.accepts = ir::is_float;
  if (!pair.aten.empty()) op.pairs = {std::move(pair)};
  op.infer = infer_like_first;
  op.lower = lower;
  op.work = {.elementwise = true, .fused = fused};
  return op;
}

// Of gated linear units. The input to split is the last one, of a gradient, too.
std::optional<RenamedAxes> rename_dim(const Node& node) {
  const Value* x = node.inputs.back();
  if (!x->type.shape) return std::nullopt;
  RenamedAxes renamed{.attrs = node.attrs};
  const int64_t axis = ir::int_attr(node.attrs, "dim", -1);
  renamed.attrs.insert_or_assign("dim", Dim(channels_last_axis(node, axis, x->type.shape->size())));
  return renamed;
}

}  // namespace

Value* gelu(Formula& f, Value* x) {
  Value* error = f.make("Erf", {f.scaled(x, 1 / std::numbers::sqrt2)});
  Value* half = f.scaled(x, 0.5);
  return f.mul(half, f.add(error, f.constant(1)));
}

Value* gelu_tanh(Formula& f, Value* x) {
  Value* cube = f.mul(f.mul(x, x), x);
  const double factor = std::sqrt(2 / std::numbers::pi);
  Value* inner = f.scaled(f.add(x, f.scaled(cube, 0.044715)), factor);
  Value* half = f.scaled(x, 0.5);
  return f.mul(half, f.add(f.make("Tanh", {inner}), f.constant(1)));
}

Value* hard_swish(Formula& f, Value* x) {
  return f.mul(x, f.make("HardSigmoid", {x}, {{"alpha", 1.0 / 6.0}, {"beta", 0.5}}));
}

Value* mish(Formula& f, Value* x) { return f.mul(x, f.make("Tanh", {f.make("Softplus", {x})})); }

Value* silu(Formula& f, Value* x) { return f.mul(x, f.make("Sigmoid", {x})); }

void register_activation(Registry& ops) {
  const AttrRule alpha = {"alpha", kFloat}, beta = {"beta", kFloat}, gamma = {"gamma", kFloat};
  const Pair::Argument no_scale = {"scale", nullptr, 1.0}, of_input = {"input_scale", nullptr, 1.0};
  const ir::Attrs sixth = {{"alpha", 1.0 / 6.0}, {"beta", 0.5}};
  ops.add(activation(
      "Elu", 6, 22,
      {.aten = "aten::elu", .arguments = {{"alpha", "alpha", 1.0}, no_scale, of_input}}, {alpha}));
  ops.add(activation("Gelu", 20, 20,
                     {.aten = "aten::gelu", .arguments = {{"approximate", "approximate", "none"}}},
                     {{"approximate", kString}}, lower_gelu, fused_gelu));
  ops.add(activation("HardSigmoid", 6, 22, {.aten = "aten::hardsigmoid", .attrs = sixth},
                     {alpha, beta}, lower_hard_sigmoid));
  ops.add(
      activation("HardSwish", 14, 22, {"aten::hardswish"}, {}, lower_pair, Pointwise::kHardSwish));
  ops.add(activation("LeakyRelu", 6, 16,
                     {.aten = "aten::leaky_relu", .arguments = {{"negative_slope", "alpha", 0.01}}},
                     {alpha}, lower_pair, fused_leaky_relu));
  ops.add(activation("Mish", 18, 22, {"aten::mish"}));
  Op prelu = activation("PRelu", 9, 16, {}, {}, lower_prelu);
  prelu.min_inputs = prelu.max_inputs = 2;
  prelu.infer = infer_prelu;
  ops.add(prelu);
  ops.add(activation(
      "Selu", 6, 22,
      {.aten = "aten::elu",
       .arguments = {{"alpha", "alpha", kSeluAlpha}, {"scale", "gamma", kSeluScale}, of_input}},
      {alpha, gamma}));
  ops.add(activation("Softplus", 1, 22,
                     {.aten = "aten::softplus",
                      .accepts = is_narrow_float,
                      .arguments = {{"beta", nullptr, 1.0}, {"threshold", nullptr, 20.0}}}));
  ops.add(activation("Softsign", 1, 22, {}, {}, lower_softsign));
  ops.add(activation("Swish", 24, 24, {"aten::silu"}, {alpha}, lower_swish, fused_swish));

  ops.add(Operator{.name = "aten::gelu_backward", .work = {.fused = fused_gelu_grad}});
  ops.add(Operator{
      .name = "aten::leaky_relu_backward",
      .work = {.elementwise = true, .fused = fused_leaky_relu_grad},
  });
  ops.add(
      Operator{.name = "aten::hardswish_backward", .work = {.fused = Pointwise::kHardSwishGrad}});
  ops.add(Operator{.name = "aten::sigmoid_backward", .work = {.fused = Pointwise::kSigmoidGrad}});
  ops.add(Operator{.name = "aten::silu", .work = {.fused = Pointwise::kSilu}});
  ops.add(Operator{.name = "aten::silu_backward", .work = {.fused = Pointwise::kSiluGrad}});
  ops.add(Operator{.name = aten::kTanhBackward, .work = {.fused = Pointwise::kTanhGrad}});
  ops.add(Operator{.name = "aten::threshold_backward", .work = {.fused = fused_threshold_grad}});
  for (const char* name : {aten::kEluBackward, aten::kHardSigmoidBackward, aten::kHardTanhBackward,
                           aten::kMishBackward, aten::kSoftplusBackward}) {
    ops.add(Operator{.name = name, .work = {.elementwise = true}});
  }
  for (const char* name : {aten::kGlu, aten::kGluBackward}) {
    ops.add(Operator{
        .name = name,
        .work = {.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_dim}},
    });
  }
}

}  // namespace torch_ort::ops
