// Activation functions with a shape of their own; relu, tanh and sigmoid are in
// aten_elementwise.cpp.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

using ir::Value;
using Values = std::vector<Value*>;

// The tensor of the call; nothing if its dtype is not one that these ops compute in.
Value* float_input(const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  return x != nullptr && is_float(x->type.dtype) && call.types[0].dtype == x->type.dtype ? x
                                                                                         : nullptr;
}

Row plain(std::string op, ir::Attrs attrs = {}) {
  return [op = std::move(op), attrs = std::move(attrs)](Builder& builder,
                                                        const AtenCall& call) -> Values {
    Value* x = float_input(call);
    return x == nullptr ? Values() : standard(builder, op, {x}, call.types, attrs);
  };
}

Values gelu(Builder& builder, const AtenCall& call) {
  Value* x = float_input(call);
  if (x == nullptr) return {};
  return standard(builder, "Gelu", {x}, call.types,
                  {{"approximate", text(call.arg("approximate"), "none")}});
}

Values leaky_relu(Builder& builder, const AtenCall& call) {
  Value* x = float_input(call);
  const ops::Arg& slope = call.arg("negative_slope");
  if (x == nullptr || !is_number(slope)) return {};
  return standard(builder, "LeakyRelu", {x}, call.types, {{"alpha", number(slope)}});
}

Values elu(Builder& builder, const AtenCall& call) {
  Value* x = float_input(call);
  const ops::Arg &alpha = call.arg("alpha"), &scale = call.arg("scale");
  const ops::Arg& input_scale = call.arg("input_scale");
  if (x == nullptr || !is_number(alpha) || !is_number(scale) || !is_number(input_scale)) return {};
  if (number(input_scale) != 1.0) return {};
  if (number(scale) == 1.0) {
    return standard(builder, "Elu", {x}, call.types, {{"alpha", number(alpha)}});
  }
  return standard(builder, "Selu", {x}, call.types,
                  {{"alpha", number(alpha)}, {"gamma", number(scale)}});
}

Values softplus(Builder& builder, const AtenCall& call) {
  Value* x = float_input(call);
  const ops::Arg &beta = call.arg("beta"), &threshold = call.arg("threshold");
  if (x == nullptr || !is_number(beta) || !is_number(threshold)) return {};
  // PyTorch returns x above the threshold. In float64 this differs from the function.
  if (x->type.dtype == ir::DType::kDouble) return {};
  if (number(beta) != 1.0 || number(threshold) != 20.0) return {};
  return standard(builder, "Softplus", {x}, call.types);
}

Values prelu(Builder& builder, const AtenCall& call) {
  Value *x = float_input(call), *slope = tensor(call.arg("weight"));
  if (x == nullptr || slope == nullptr || slope->type.dtype != x->type.dtype) return {};
  if (!x->type.shape || !slope->type.shape) return {};
  if (slope->type.shape->size() > x->type.shape->size()) return {};
  return standard(builder, "PRelu", {x, slope}, call.types);
}

}  // namespace

void add_activation(Table& table) {
  table.add("aten::_prelu_kernel", prelu);
  table.add("aten::elu", elu);
  table.add("aten::gelu", gelu);
  table.add("aten::hardsigmoid", plain("HardSigmoid", {{"alpha", 1.0 / 6.0}, {"beta", 0.5}}));
  table.add("aten::hardswish", plain("HardSwish"));
  table.add("aten::leaky_relu", leaky_relu);
  table.add("aten::mish", plain("Mish"));
  table.add("aten::silu", plain("Swish"));
  table.add("aten::softplus", softplus);
}

}  // namespace torch_ort::convert
