// Ops that compute each element of the result from the elements in the same place.

#include "base/error.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/broadcast.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <iterator>

namespace torch_ort::ops {

namespace {

using ir::DType;
using ir::Node;
using ir::Type;
using ir::Value;
using enum AttrKind;

bool is_small_integer(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kUInt8 || dtype == DType::kInt16;
}

bool is_integer(DType dtype) {
  return is_small_integer(dtype) || dtype == DType::kInt32 || dtype == DType::kInt64;
}

// The number in a constant without dims. PyTorch's kernels get it as a Python number.
std::optional<Arg> scalar_of(const Value* value) {
  if (value == nullptr || !value->type.shape || !value->type.shape->empty()) return std::nullopt;
  return known_number(value);
}

template <typename Row, size_t kSize>
const Row& row_of(const Row (&rows)[kSize], const Node& node) {
  const Row* row = std::find_if(std::begin(rows), std::end(rows),
                                [&](const Row& each) { return node.op.name == each.name; });
  ORT_CHECK(row != std::end(rows), "ops: no row for ", node.op.str());
  return *row;
}

// ---- one input

struct Unary {
  const char* name;
  const char* aten;
  int since;
  int bfloat16_since;
  FusedRule fused = {};
  bool gives_bool = false;
};

constexpr Unary kUnary[] = {
    {"Abs", "aten::abs", 6, 13, Pointwise::kAbs},
    {"Acos", "aten::acos", 7, 22},
    {"Acosh", "aten::acosh", 9, 22},
    {"Asin", "aten::asin", 7, 22},
    {"Asinh", "aten::asinh", 9, 22},
    {"Atan", "aten::atan", 7, 22},
    {"Atanh", "aten::atanh", 9, 22},
    {"BitwiseNot", "aten::bitwise_not", 18, 18},
    {"Ceil", "aten::ceil", 6, 13, Pointwise::kCeil},
    {"Cos", "aten::cos", 7, 22, Pointwise::kCos},
    {"Cosh", "aten::cosh", 9, 22},
    {"Erf", "aten::erf", 9, 13, Pointwise::kErf},
    {"Exp", "aten::exp", 6, 13, Pointwise::kExp},
    {"Floor", "aten::floor", 6, 13, Pointwise::kFloor},
    {"IsInf", "aten::isinf", 10, 20, {}, true},
    {"IsNaN", "aten::isnan", 9, 13, Pointwise::kIsNan, true},
    {"Log", "aten::log", 6, 13, Pointwise::kLog},
    {"Neg", "aten::neg", 6, 13, Pointwise::kNeg},
    {"Not", "aten::logical_not", 1, 1, Pointwise::kNot, true},
    {"Reciprocal", "aten::reciprocal", 6, 13, Pointwise::kReciprocal},
    {"Relu", "aten::relu", 6, 13, Pointwise::kRelu},
    {"Round", "aten::round", 11, 22, Pointwise::kRound},
    {"Sigmoid", "aten::sigmoid", 6, 13, Pointwise::kSigmoid},
    {"Sign", "aten::sign", 9, 13, Pointwise::kSign},
    {"Sin", "aten::sin", 7, 22, Pointwise::kSin},
    {"Sinh", "aten::sinh", 9, 22},
    {"Sqrt", "aten::sqrt", 6, 13, Pointwise::kSqrt},
    {"Tan", "aten::tan", 7, 22},
    {"Tanh", "aten::tanh", 6, 13, Pointwise::kTanh},
};

std::vector<Type> infer_unary(const Node& node) {
  const Type& x = input(node, 0).type;
  Type type = with_shape(x, x.shape);
  if (row_of(kUnary, node).gives_bool) type.dtype = DType::kBool;
  return {type};
}

void lower_unary(const Node& node, CallList& calls) {
  for (const char* name : {"detect_negative", "detect_positive"}) {
    if (ir::int_attr(node.attrs, name, 1) == 0)
      throw Unsupported(concat("IsInf: ", name, ": got 0, want 1"));
  }
  calls.add(row_of(kUnary, node).aten, "", {node.inputs[0]}, {node.outputs[0]});
}

int unary_since(const Node& node) {
  const DType dtype = input(node, 0).type.dtype;
  if (node.op.name == "Relu" && is_integer(dtype)) return 14;
  if (node.op.name == "IsInf" && dtype == DType::kHalf) return 20;
  return row_of(kUnary, node).since;
}

// ---- two inputs

// How a kernel takes a number in place of its second tensor.
enum class Numbers { kNone, kScalar, kScalarAndAlpha };

struct Binary {
  const char* name;
  const char* aten;
  int since;
  int bfloat16_since;
  Numbers numbers;
  bool commutes;
  FusedRule fused = {};
  bool gives_bool = false;
};

constexpr Binary kBinary[] = {
    {"Add", "aten::add", 7, 13, Numbers::kScalarAndAlpha, true, Pointwise::kAdd},
    {"And", "aten::logical_and", 7, 7, Numbers::kNone, true, Pointwise::kAnd, true},
    {"BitwiseAnd", "aten::bitwise_and", 18, 18, Numbers::kScalar, true},
    {"BitwiseOr", "aten::bitwise_or", 18, 18, Numbers::kScalar, true},
    {"BitwiseXor", "aten::bitwise_xor", 18, 18, Numbers::kScalar, true},
    {"Div", "aten::div", 7, 13, Numbers::kScalar, false, Pointwise::kDiv},
    {"Equal", "aten::eq", 11, 13, Numbers::kScalar, true, Pointwise::kEqual, true},
    {"Greater", "aten::gt", 9, 13, Numbers::kScalar, false, Pointwise::kGreater, true},
    {"GreaterOrEqual", "aten::ge", 12, 16, Numbers::kScalar, false, Pointwise::kGreaterOrEqual,
     true},
    {"Less", "aten::lt", 9, 13, Numbers::kScalar, false, Pointwise::kLess, true},
    {"LessOrEqual", "aten::le", 12, 16, Numbers::kScalar, false, Pointwise::kLessOrEqual, true},
    {"Mod", "aten::remainder", 10, 13, Numbers::kScalar, false},
    {"Mul", "aten::mul", 7, 13, Numbers::kScalar, true, Pointwise::kMul},
    {"Or", "aten::logical_or", 7, 7, Numbers::kNone, true, Pointwise::kOr, true},
    {"Sub", "aten::sub", 7, 13, Numbers::kScalarAndAlpha, false, Pointwise::kSub},
    {"Xor", "aten::logical_xor", 7, 7, Numbers::kNone, true, Pointwise::kXor, true},
};

std::vector<Type> infer_binary(const Node& node) {
  want_same_dtype(node, {0, 1});
  const DType dtype = row_of(kBinary, node).gives_bool ? DType::kBool : input(node, 0).type.dtype;
  return {type_like_inputs(node, dtype, broadcast_inputs(node))};
}

// In ONNX the quotient of integers is truncated, as in C.
bool is_integer_division(const Node& node) {
  return node.op.name == "Div" && is_integer(input(node, 0).type.dtype);
}

void lower_binary(const Node& node, CallList& calls) {
  const Binary& row = row_of(kBinary, node);
  std::string aten = row.aten;
  if (node.op.name == "Mod" && ir::int_attr(node.attrs, "fmod", 0) != 0) aten = "aten::fmod";
  Value *a = &input(node, 0), *b = &input(node, 1);
  if (row.commutes && scalar_of(a) && !scalar_of(b)) std::swap(a, b);
  const std::optional<Arg> number = scalar_of(a) ? std::nullopt : scalar_of(b);
  const bool takes_number = number && row.numbers != Numbers::kNone;

  ArgList args = {a, takes_number ? *number : Arg(b)};
  // Logical operators have one overload, which has no name.
  const bool is_logical = row.numbers == Numbers::kNone;
  std::string overload = is_logical ? "" : takes_number ? "Scalar" : "Tensor";
  if (row.numbers == Numbers::kScalarAndAlpha) args.push_back(1);
  if (is_integer_division(node)) {
    overload += "_mode";
    args.push_back("trunc");
  }
  calls.add(std::move(aten), std::move(overload), std::move(args), {node.outputs[0]});
}

int binary_since(const Node& node) {
  const Binary& row = row_of(kBinary, node);
  const bool is_arithmetic = row.since == 7 && !row.gives_bool;
  return is_arithmetic && is_small_integer(input(node, 0).type.dtype) ? 14 : row.since;
}

// The result has the dtype of the base, whatever the dtype of the exponent is.
std::vector<Type> infer_pow(const Node& node) {
  return {type_like_inputs(node, input(node, 0).type.dtype, broadcast_inputs(node))};
}

void lower_pow(const Node& node, CallList& calls) {
  Value *base = &input(node, 0), *exponent = &input(node, 1);
  const std::optional<Arg> base_number = scalar_of(base), number = scalar_of(exponent);
  if (number && !base_number) {
    calls.add("aten::pow", "Tensor_Scalar", {base, *number}, {node.outputs[0]});
    return;
  }
  if (base->type.dtype != exponent->type.dtype) {
    throw Unsupported(concat("Pow: dtype of the exponent: got ", ir::name(exponent->type.dtype),
                             ", want ", ir::name(base->type.dtype), " as the base"));
  }
  if (base_number && !number) {
    calls.add("aten::pow", "Scalar", {*base_number, exponent}, {node.outputs[0]});
  } else {
    calls.add("aten::pow", "Tensor_Tensor", {base, exponent}, {node.outputs[0]});
  }
}

// ---- Min, Max: any number of inputs

std::vector<Type> infer_extremum(const Node& node) {
  std::vector<size_t> slots(node.inputs.size());
  for (size_t slot = 0; slot < slots.size(); ++slot) slots[slot] = slot;
  want_same_dtype(node, slots);
  return {type_like_inputs(node, input(node, 0).type.dtype, broadcast_inputs(node))};
}

void lower_extremum(const Node& node, CallList& calls) {
  const char* aten = node.op.name == "Min" ? "aten::minimum" : "aten::maximum";
  Value* result = &input(node, 0);
  if (node.inputs.size() == 1) {
    calls.add("aten::clone", "", {result, "contiguous_format"}, {node.outputs[0]});
  }
  std::optional<ir::Shape> shape = result->type.shape;
  for (size_t slot = 1; slot < node.inputs.size(); ++slot) {
    Value* next = &input(node, slot);
    shape = broadcast(node, shape, next->type.shape);
    const bool is_last = slot + 1 == node.inputs.size();
    Value* extremum = is_last ? node.outputs[0]
                              : calls.temporary(type_like_inputs(node, result->type.dtype, shape));
    calls.add(aten, "", {result, next}, {extremum});
    result = extremum;
  }
}

// ---- Where, Clip, Cast

std::vector<Type> infer_where(const Node& node) {
  want_same_dtype(node, {1, 2});
  return {type_like_inputs(node, input(node, 1).type.dtype, broadcast_inputs(node))};
}

void lower_where(const Node& node, CallList& calls) {
  Value *condition = &input(node, 0), *x = &input(node, 1), *y = &input(node, 2);
  const std::optional<Arg> if_true = scalar_of(x), if_false = scalar_of(y);
  // On other devices the kernels accept no tensors that are on the CPU.
  const bool is_elsewhere = !ir::is_host(node.outputs[0]->type.device);
  if (is_elsewhere && if_true && y->type.shape == node.outputs[0]->type.shape) {
    calls.add("aten::masked_fill", "Scalar", {y, condition, *if_true}, {node.outputs[0]});
  } else if (is_elsewhere && if_true && !if_false) {
    calls.add("aten::where", "ScalarSelf", {condition, *if_true, y}, {node.outputs[0]});
  } else if (is_elsewhere && if_false && !if_true) {
    calls.add("aten::where", "ScalarOther", {condition, x, *if_false}, {node.outputs[0]});
  } else {
    calls.add("aten::where", "self", {condition, x, y}, {node.outputs[0]});
  }
}

std::vector<Type> infer_like_first(const Node& node) {
  return {with_shape(input(node, 0).type, input(node, 0).type.shape)};
}

void lower_clip(const Node& node, CallList& calls) {
  Value* x = &input(node, 0);
  Arg bounds[2];
  bool all_known = true;
  for (size_t i = 0; i < 2; ++i) {
    if (!has_input(node, i + 1)) continue;
    const std::optional<Arg> number = known_number(node.inputs[i + 1]);
    all_known = all_known && number.has_value();
    if (number) bounds[i] = *number;
  }
  if (!all_known) {
    Value* low = has_input(node, 1) ? node.inputs[1] : nullptr;
    Value* high = has_input(node, 2) ? node.inputs[2] : nullptr;
    calls.add("aten::clamp", "Tensor", {x, low, high}, {node.outputs[0]});
  } else if (bounds[0].is_none() && bounds[1].is_none()) {
    calls.add("aten::clone", "", {x, "contiguous_format"}, {node.outputs[0]});
  } else {
    calls.add("aten::clamp", "", {x, bounds[0], bounds[1]}, {node.outputs[0]});
  }
}

DType cast_target(const Node& node) {
  if (!ir::has_attr(node.attrs, "to")) throw UserError("Cast: attribute 'to' is missing");
  const int64_t number = ir::int_attr(node.attrs, "to", 0);
  if (number < 1 || number > static_cast<int64_t>(DType::kFloat8E5M2FNUZ)) {
    throw UserError(concat("Cast: to: got ", number, ", want the number of a data type, 1 to ",
                           static_cast<int64_t>(DType::kFloat8E5M2FNUZ)));
  }
  return static_cast<DType>(number);
}

std::vector<Type> infer_cast(const Node& node) {
  Type type = with_shape(input(node, 0).type, input(node, 0).type.shape);
  type.dtype = cast_target(node);
  return {type};
}

void lower_cast(const Node& node, CallList& calls) {
  calls.add("aten::_to_copy", "",
            {&input(node, 0), ir::name(cast_target(node)), Arg(), Arg(), Arg(), false, Arg()},
            {node.outputs[0]});
}

// These attributes came with later opsets, but nodes of older ones may have them with their
// default.
int cast_since(const Node& node) {
  if (ir::has_attr(node.attrs, "round_mode")) return 24;
  return ir::has_attr(node.attrs, "saturate") ? 19 : 9;
}

// In ONNX these ops have operands of one dtype. Other calls stay ATen nodes, because PyTorch
// promotes their operands. A region promotes them too, as it computes in float32. An operand that
// PyTorch would narrow, such as a 0-d double beside a float32 tensor, is not for regions.
template <Pointwise kOp>
FusedForm fused_mixed(const Node& node) {
  const Call call = decode_aten(node);
  if (call.overload != "Tensor" || node.inputs.size() != 2) return {};
  const int64_t size = ir::size_bytes(node.outputs[0]->type.dtype);
  for (const Value* value : node.inputs) {
    if (value == nullptr || ir::size_bytes(value->type.dtype) > size) return {};
  }
  if (call.args.size() > 2) {  // alpha
    const auto* alpha = std::get_if<ir::Dim>(&call.args[2].value);
    const auto* real = std::get_if<double>(&call.args[2].value);
    const bool is_one = alpha != nullptr ? *alpha == ir::Dim(1) : real != nullptr && *real == 1;
    if (!is_one) return {};
  }
  return pointwise_form(node, kOp);
}

FusedForm fused_cast(const Node& node) {
  const auto is_number = [](DType dtype) {
    return ir::is_float(dtype) || is_integer(dtype) || dtype == DType::kBool;
  };
  const DType from = node.inputs[0]->type.dtype, to = node.outputs[0]->type.dtype;
  if (!is_number(from) || !is_number(to)) return {};
  if (to == DType::kBool) return {FusedForm::Kind::kPointwise, Pointwise::kToBool, {}};
  if (ir::is_float(to) || from == DType::kBool || from == to) return {FusedForm::Kind::kPass};
  // Casts between integers wrap around, and those of NaN and infinity depend on the processor.
  return {};
}

// The kernel for a number makes a tensor of it and calls the other overload, which has an `out=`.
bool take_number_as_tensor(const Call& call, bool, CallList& calls) {
  if (call.overload != "Scalar" || call.args.size() < 2) return false;
  calls.add(call.op, "Tensor", call.args, call.outputs);
  return true;
}

bool take_relu_as_clamp(const Call& call, bool, CallList& calls) {
  calls.add("aten::clamp_min", "", {call.args.at(0), 0}, call.outputs);
  return true;
}

ArgList copied(const ArgList& args) { return {args.at(0), false}; }

Op op(std::string name, int inputs, int since, int bfloat16_since, InferRule infer,
      Lowering lower) {
  Op op;
  op.name = std::move(name);
  op.min_inputs = inputs;
  op.max_inputs = inputs;
  op.since = since;
  op.bfloat16_since = bfloat16_since;
  op.infer = infer;
  op.lower = lower;
  op.work.elementwise = true;
  return op;
}

}  // namespace

void register_elementwise(Registry& ops) {
  for (const Unary& row : kUnary) {
    Op unary = op(row.name, 1, row.since, row.bfloat16_since, infer_unary, lower_unary);
    unary.since_of = unary_since;
    unary.work.fused = row.fused;
    if (unary.name == "IsInf") {
      unary.attributes = {{"detect_negative", kInt}, {"detect_positive", kInt}};
    }
    ops.add(unary);
  }
  for (const Binary& row : kBinary) {
    Op binary = op(row.name, 2, row.since, row.bfloat16_since, infer_binary, lower_binary);
    binary.since_of = binary_since;
    binary.work.fused = row.fused;
    if (binary.name == "Mod") binary.attributes = {{"fmod", kInt}};
    ops.add(binary);
  }
  Op pow = op("Pow", 2, 12, 15, infer_pow, lower_pow);
  pow.work.fused = Pointwise::kPow;
  ops.add(pow);
  for (const char* name : {"Min", "Max"}) {
    Op extremum = op(name, 1, 12, 13, infer_extremum, lower_extremum);
    extremum.max_inputs = -1;
    extremum.work.fused = extremum.name == "Min" ? Pointwise::kMin : Pointwise::kMax;
    ops.add(extremum);
  }
  Op where = op("Where", 3, 9, 16, infer_where, lower_where);
  where.work.fused = Pointwise::kWhere;
  ops.add(where);
  Op clip = op("Clip", 1, 12, 13, infer_like_first, lower_clip);
  clip.max_inputs = 3;
  ops.add(clip);
  Op cast = op("Cast", 1, 9, 13, infer_cast, lower_cast);
  cast.attributes = {{"to", kInt, true}, {"round_mode", kString}, {"saturate", kInt}};
  cast.since_of = cast_since;
  cast.work.keeps_elements = true;
  cast.work.fused = fused_cast;
  ops.add(cast);

  const std::pair<const char*, FusedFunction> kSums[] = {
      {"aten::add", fused_mixed<Pointwise::kAdd>}, {"aten::sub", fused_mixed<Pointwise::kSub>}};
  for (const auto& [name, fused] : kSums) {
    ops.add(Operator{
        .name = name,
        .work = {.fused = fused},
        .out_rewrite = take_number_as_tensor,
    });
  }
  // Nodes of these two operators may have a size as their second operand.
  const std::pair<const char*, FusedFunction> kProducts[] = {
      {aten::kDiv, fused_mixed<Pointwise::kDiv>}, {aten::kMul, fused_mixed<Pointwise::kMul>}};
  for (const auto& [name, fused] : kProducts) {
    ops.add(Operator{
        .name = name,
        .work = {.elementwise = true, .fused = fused},
        .out_rewrite = take_number_as_tensor,
    });
  }
  ops.add(Operator{.name = "aten::relu", .out_rewrite = take_relu_as_clamp});
  ops.add(Operator{
      .name = aten::kClone,
      .overwrite = {.op = "aten::copy_", .args = copied, .over_operands = true},
  });
  ops.add(Operator{
      .name = "aten::_to_copy",
      .overwrite = {.op = "aten::copy_", .args = copied},
  });
  ops.add(Operator{.name = "aten::trunc", .work = {.fused = Pointwise::kTrunc}});
}

}  // namespace torch_ort::ops
