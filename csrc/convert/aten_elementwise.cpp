// Element-wise arithmetic, comparisons, choices and casts.
// ONNX wants operands of one dtype. Where PyTorch widens one to the dtype of the other, a Cast does
// so; calls that mix dtypes in other ways stay as they are.

#include "convert/families.h"
#include "convert/rows.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::DType;
using ir::Value;
using Values = std::vector<Value*>;

bool is_signed_integer(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kInt16 || dtype == DType::kInt32 ||
         dtype == DType::kInt64;
}

bool is_number_dtype(DType dtype) {
  return is_float(dtype) || is_signed_integer(dtype) || dtype == DType::kUInt8;
}

bool is_bool(DType dtype) { return dtype == DType::kBool; }

bool is_wide(DType dtype) {
  return is_float(dtype) || dtype == DType::kInt32 || dtype == DType::kInt64;
}

bool is_integer_dtype(DType dtype) { return is_number_dtype(dtype) && !is_float(dtype); }

bool is_number_or_bool(DType dtype) { return is_number_dtype(dtype) || is_bool(dtype); }

bool has_sign(DType dtype) { return is_float(dtype) || is_signed_integer(dtype); }

using Accepts = bool (*)(DType);

// ---- one operand

Row unary(std::string op, Accepts accepts) {
  return [op = std::move(op), accepts](Builder& builder, const AtenCall& call) -> Values {
    Value* x = tensor(call.args.at(0));
    if (x == nullptr || !accepts(x->type.dtype)) return {};
    const DType result = call.types[0].dtype;
    if (result != x->type.dtype && !is_bool(result)) return {};
    return standard(builder, op, {x}, call.types);
  };
}

// ---- two operands

// Whether PyTorch casts `x` to the dtype of `other`, and the cast changes no number.
bool is_widened(const Value& x, const Value& other) {
  const DType from = x.type.dtype, to = other.type.dtype;
  if (to != DType::kFloat && to != DType::kDouble) return false;
  if (is_bool(from)) return true;
  // Among floats only tensors with dims decide on the dtype.
  const bool decides =
      other.type.shape && (!other.type.shape->empty() || (x.type.shape && x.type.shape->empty()));
  return decides && is_float(from) && ir::size_bytes(from) < ir::size_bytes(to);
}

// The dtype of both operands, or of the wider one if the other is cast to it; nothing otherwise.
std::optional<DType> common_dtype(const Value& x, const Value& y) {
  if (x.type.dtype == y.type.dtype) return x.type.dtype;
  // Kernels of other devices cast while they read, so no Cast is written.
  if (!ir::is_host(x.type.device) || !ir::is_host(y.type.device)) return std::nullopt;
  if (is_widened(x, y)) return y.type.dtype;
  return is_widened(y, x) ? std::optional(x.type.dtype) : std::nullopt;
}

// Both operands as tensors of the same dtype; empty if that is impossible.
Values operands(Builder& builder, const ops::Arg& a, const ops::Arg& b, Accepts accepts) {
  Value *x = tensor(a), *y = tensor(b);
  if (x == nullptr && y == nullptr) return {};
  const std::optional<DType> dtype = x != nullptr && y != nullptr
                                         ? common_dtype(*x, *y)
                                         : std::optional((x != nullptr ? x : y)->type.dtype);
  if (!dtype || !accepts(*dtype)) return {};
  if (x == nullptr && is_number(a)) x = builder.scalar(number(a), *dtype);
  if (y == nullptr && is_number(b)) y = builder.scalar(number(b), *dtype);
  if (x == nullptr || y == nullptr) return {};
  return {builder.cast(x, *dtype), builder.cast(y, *dtype)};
}

bool is_one(const ops::Arg& arg) { return is_number(arg) && number(arg) == 1.0; }

// Whether the factor of the second operand of a sum is 1.
bool has_plain_alpha(const AtenCall& call) {
  for (size_t i = 0; i < call.args.size(); ++i) {
    if (call.arg_names[i] == "alpha" && !is_one(call.args[i])) return false;
  }
  return true;
}

Row binary(std::string op, Accepts accepts) {
  return [op = std::move(op), accepts](Builder& builder, const AtenCall& call) -> Values {
    if (!has_plain_alpha(call)) return {};
    Values inputs = operands(builder, call.args.at(0), call.args.at(1), accepts);
    if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
    return standard(builder, op, inputs, call.types);
  };
}

Values rsub(Builder& builder, const AtenCall& call) {
  if (!has_plain_alpha(call)) return {};
  Values inputs = operands(builder, call.args.at(1), call.args.at(0), is_number_dtype);
  if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
  return standard(builder, "Sub", inputs, call.types);
}

Values remainder(Builder& builder, const AtenCall& call) {
  Values inputs = operands(builder, call.args.at(0), call.args.at(1), is_integer_dtype);
  if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
  return standard(builder, "Mod", inputs, call.types);
}

Values fmod(Builder& builder, const AtenCall& call) {
  Values inputs = operands(builder, call.args.at(0), call.args.at(1), is_number_dtype);
  if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
  return standard(builder, "Mod", inputs, call.types, {{"fmod", ir::Dim(1)}});
}

Row compare(std::string op, Accepts accepts) {
  return [op = std::move(op), accepts](Builder& builder, const AtenCall& call) -> Values {
    Values inputs = operands(builder, call.args.at(0), call.args.at(1), accepts);
    return inputs.empty() ? inputs : standard(builder, op, inputs, call.types);
  };
}

Values not_equal(Builder& builder, const AtenCall& call) {
  Values inputs = operands(builder, call.args.at(0), call.args.at(1), is_number_or_bool);
  if (inputs.empty()) return {};
  ir::Type type = call.types[0];
  type.strides.reset();
  Values equal = standard(builder, "Equal", inputs, {type});
  return equal.empty() ? equal : standard(builder, "Not", equal, call.types);
}

// ONNX has another op for booleans.
Row bitwise(std::string logical_op, std::string integer_op) {
  const Row of_bools = binary(std::move(logical_op), is_bool);
  const Row of_integers = binary(std::move(integer_op), is_integer_dtype);
  return [of_bools, of_integers](Builder& builder, const AtenCall& call) -> Values {
    Values result = of_bools(builder, call);
    return result.empty() ? of_integers(builder, call) : result;
  };
}

Values bitwise_not(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr) return {};
  if (is_bool(x->type.dtype)) return standard(builder, "Not", {x}, call.types);
  if (!is_integer_dtype(x->type.dtype)) return {};
  return standard(builder, "BitwiseNot", {x}, call.types);
}

// ---- choices

Values where(Builder& builder, const AtenCall& call) {
  Value* condition = tensor(call.arg("condition"));
  if (condition == nullptr || !is_bool(condition->type.dtype)) return {};
  Values inputs = operands(builder, call.arg("self"), call.arg("other"), is_number_or_bool);
  if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
  inputs.insert(inputs.begin(), condition);
  return standard(builder, "Where", inputs, call.types);
}

Values masked_fill(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *mask = tensor(call.arg("mask"));
  if (x == nullptr || mask == nullptr || !is_bool(mask->type.dtype)) return {};
  const Value* filling = tensor(call.arg("value"));
  if (filling != nullptr && common_dtype(*filling, *x) != x->type.dtype) return {};
  Values inputs = operands(builder, call.arg("value"), call.arg("self"), is_number_or_bool);
  if (inputs.empty()) return {};
  // PyTorch copies a value from another device before the kernel runs.
  if (inputs[0]->data == nullptr && inputs[0]->type.device != x->type.device) return {};
  inputs.insert(inputs.begin(), mask);
  return standard(builder, "Where", inputs, call.types);
}

// `low_name` and `high_name` are the arguments with the bounds; "" means no such bound.
Row clip(std::string low_name, std::string high_name) {
  return [low_name, high_name](Builder& builder, const AtenCall& call) -> Values {
    Value* x = tensor(call.arg("self"));
    if (x == nullptr || !is_number_dtype(x->type.dtype)) return {};
    if (call.types[0].dtype != x->type.dtype) return {};
    Values inputs = {x};
    for (const std::string& name : {low_name, high_name}) {
      const ops::Arg bound = name.empty() ? ops::Arg() : call.arg(name);
      if (bound.is_none()) {
        inputs.push_back(nullptr);
        continue;
      }
      inputs.push_back(is_number(bound) ? builder.scalar(number(bound), x->type.dtype) : nullptr);
      if (inputs.back() == nullptr) return {};
    }
    while (inputs.back() == nullptr) inputs.pop_back();
    return inputs.size() == 1 ? Values() : standard(builder, "Clip", inputs, call.types);
  };
}

// ---- casts

// Whether the call changes only the dtype.
bool is_plain_cast(const AtenCall& call, const ir::Type& from) {
  const auto is_flag_off = [&](const char* name) {
    return call.arg(name).is_none() || !boolean(call.arg(name));
  };
  if (call.types[0].device != from.device || !is_flag_off("pin_memory")) return false;
  if (text(call.arg("layout"), "strided") != "strided") return false;
  const std::string format = text(call.arg("memory_format"), "preserve_format");
  if (format == "contiguous_format") return is_row_major(from);
  return format == "preserve_format";
}

Values to_copy(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  const DType to = call.types[0].dtype;
  if (x == nullptr || !is_number_or_bool(x->type.dtype) || !is_number_or_bool(to)) return {};
  if (to == x->type.dtype || !is_plain_cast(call, x->type)) return {};
  return standard(builder, "Cast", {x}, call.types, {{"to", ir::Dim(static_cast<int64_t>(to))}});
}

void add_both(Table& table, const std::string& name, const Row& row) {
  table.add(name + ".Tensor", row);
  table.add(name + ".Scalar", row);
}

}  // namespace

void add_elementwise(Table& table) {
  table.add("aten::abs", unary("Abs", is_number_dtype));
  table.add("aten::acos", unary("Acos", is_float));
  table.add("aten::acosh", unary("Acosh", is_float));
  table.add("aten::asin", unary("Asin", is_float));
  table.add("aten::asinh", unary("Asinh", is_float));
  table.add("aten::atan", unary("Atan", is_float));
  table.add("aten::atanh", unary("Atanh", is_float));
  table.add("aten::ceil", unary("Ceil", is_float));
  table.add("aten::cos", unary("Cos", is_float));
  table.add("aten::cosh", unary("Cosh", is_float));
  table.add("aten::erf", unary("Erf", is_float));
  table.add("aten::exp", unary("Exp", is_float));
  table.add("aten::floor", unary("Floor", is_float));
  table.add("aten::isinf", unary("IsInf", is_float));
  table.add("aten::isnan", unary("IsNaN", is_float));
  table.add("aten::log", unary("Log", is_float));
  table.add("aten::logical_not", unary("Not", is_bool));
  table.add("aten::neg", unary("Neg", has_sign));
  table.add("aten::reciprocal", unary("Reciprocal", is_float));
  table.add("aten::relu", unary("Relu", has_sign));
  table.add("aten::round", unary("Round", is_float));
  table.add("aten::sigmoid", unary("Sigmoid", is_float));
  table.add("aten::sign", unary("Sign", is_number_dtype));
  table.add("aten::sin", unary("Sin", is_float));
  table.add("aten::sinh", unary("Sinh", is_float));
  table.add("aten::sqrt", unary("Sqrt", is_float));
  table.add("aten::tan", unary("Tan", is_float));
  table.add("aten::tanh", unary("Tanh", is_float));

  add_both(table, "aten::add", binary("Add", is_number_dtype));
  add_both(table, "aten::sub", binary("Sub", is_number_dtype));
  add_both(table, "aten::mul", binary("Mul", is_number_dtype));
  // PyTorch's quotient of integers is a float.
  add_both(table, "aten::div", binary("Div", is_float));
  add_both(table, "aten::rsub", rsub);
  add_both(table, "aten::remainder", remainder);
  add_both(table, "aten::fmod", fmod);
  table.add("aten::pow.Tensor_Tensor", binary("Pow", is_wide));
  table.add("aten::pow.Tensor_Scalar", binary("Pow", is_wide));
  table.add("aten::pow.Scalar", binary("Pow", is_wide));
  table.add("aten::maximum", binary("Max", is_number_dtype));
  table.add("aten::minimum", binary("Min", is_number_dtype));

  add_both(table, "aten::eq", compare("Equal", is_number_or_bool));
  add_both(table, "aten::ne", not_equal);
  add_both(table, "aten::lt", compare("Less", is_number_dtype));
  add_both(table, "aten::le", compare("LessOrEqual", is_number_dtype));
  add_both(table, "aten::gt", compare("Greater", is_number_dtype));
  add_both(table, "aten::ge", compare("GreaterOrEqual", is_number_dtype));
  table.add("aten::logical_and", binary("And", is_bool));
  table.add("aten::logical_or", binary("Or", is_bool));
  table.add("aten::logical_xor", binary("Xor", is_bool));
  add_both(table, "aten::bitwise_and", bitwise("And", "BitwiseAnd"));
  add_both(table, "aten::bitwise_or", bitwise("Or", "BitwiseOr"));
  add_both(table, "aten::bitwise_xor", bitwise("Xor", "BitwiseXor"));
  table.add("aten::bitwise_not", bitwise_not);

  table.add("aten::where.self", where);
  table.add("aten::masked_fill.Scalar", masked_fill);
  table.add("aten::masked_fill.Tensor", masked_fill);
  table.add("aten::clamp", clip("min", "max"));
  table.add("aten::clamp_min", clip("min", ""));
  table.add("aten::clamp_max", clip("", "max"));
  table.add("aten::hardtanh", clip("min_val", "max_val"));
  table.add("aten::_to_copy", to_copy);
}

}  // namespace torch_ort::convert
