// Ops that compute each element of the result from the elements in the same place.

#include "base/error.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/broadcast.h"
#include "ops/cast.h"
#include "ops/dtypes.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::DType;
using ir::is_float;
using ir::is_integer;
using ir::is_number;
using ir::is_number_or_bool;
using ir::Node;
using ir::Type;
using ir::Value;
using enum AttrKind;

bool is_small_integer(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kUInt8 || dtype == DType::kInt16;
}

// The number in a constant without dims. PyTorch's kernels get it as a Python number.
std::optional<Arg> scalar_of(const Value* value) {
  if (value == nullptr || !value->type.shape || !value->type.shape->empty()) return std::nullopt;
  return known_number(value);
}

const std::vector<Pair>& pairs_of(const Node& node) { return registry().find(node.op)->pairs; }

bool gives_bool(const Node& node) { return pairs_of(node)[0].gives == DType::kBool; }

// ---- one input

struct Unary {
  const char* name;
  const char* aten;
  bool (*accepts)(DType);
  int since;
  int bfloat16_since;
  FusedRule fused = {};
  bool gives_bool = false;
};

constexpr Unary kUnary[] = {
    {"Abs", "aten::abs", is_number, 6, 13, Pointwise::kAbs},
    {"Acos", "aten::acos", is_float, 7, 22},
    {"Acosh", "aten::acosh", is_float, 9, 22},
    {"Asin", "aten::asin", is_float, 7, 22},
    {"Asinh", "aten::asinh", is_float, 9, 22},
    {"Atan", "aten::atan", is_float, 7, 22},
    {"Atanh", "aten::atanh", is_float, 9, 22},
    {"BitwiseNot", "aten::bitwise_not", is_integer, 18, 18},
    {"Ceil", "aten::ceil", is_float, 6, 13, Pointwise::kCeil},
    {"Cos", "aten::cos", is_float, 7, 22, Pointwise::kCos},
    {"Cosh", "aten::cosh", is_float, 9, 22},
    {"Erf", "aten::erf", is_float, 9, 13, Pointwise::kErf},
    {"Exp", "aten::exp", is_float, 6, 13, Pointwise::kExp},
    {"Floor", "aten::floor", is_float, 6, 13, Pointwise::kFloor},
    {"IsInf", "aten::isinf", is_float, 10, 20, {}, true},
    {"IsNaN", "aten::isnan", is_float, 9, 13, Pointwise::kIsNan, true},
    {"Log", "aten::log", is_float, 6, 13, Pointwise::kLog},
    {"Neg", "aten::neg", has_sign, 6, 13, Pointwise::kNeg},
    {"Not", "aten::logical_not", is_bool, 1, 1, Pointwise::kNot, true},
    {"Reciprocal", "aten::reciprocal", is_float, 6, 13, Pointwise::kReciprocal},
    {"Relu", "aten::relu", has_sign, 6, 13, Pointwise::kRelu},
    {"Round", "aten::round", is_float, 11, 22, Pointwise::kRound},
    {"Sigmoid", "aten::sigmoid", is_float, 6, 13, Pointwise::kSigmoid},
    {"Sign", "aten::sign", is_number, 9, 13, Pointwise::kSign},
    {"Sin", "aten::sin", is_float, 7, 22, Pointwise::kSin},
    {"Sinh", "aten::sinh", is_float, 9, 22},
    {"Sqrt", "aten::sqrt", is_float, 6, 13, Pointwise::kSqrt},
    {"Tan", "aten::tan", is_float, 7, 22},
    {"Tanh", "aten::tanh", is_float, 6, 13, Pointwise::kTanh},
};

std::vector<Type> infer_unary(const Node& node) {
  const Type& x = input(node, 0).type;
  Type type = with_shape(x, x.shape);
  if (gives_bool(node)) type.dtype = DType::kBool;
  return {type};
}

void lower_unary(const Node& node, CallList& calls) {
  for (const char* name : {"detect_negative", "detect_positive"}) {
    if (ir::int_attr(node.attrs, name, 1) == 0)
      throw Unsupported(concat("IsInf: ", name, ": got 0, want 1"));
  }
  lower_pair(node, calls);
}

int unary_since(const Node& node) {
  const DType dtype = input(node, 0).type.dtype;
  if (node.op.name == "Relu" && is_integer(dtype)) return 14;
  if (node.op.name == "IsInf" && dtype == DType::kHalf) return 20;
  return registry().find(node.op)->since;
}

// ---- two inputs

// The overloads for two tensors, and for a number in place of the second.
std::vector<std::string> both() { return {"Tensor", "Scalar"}; }

// The factor of the second operand.
Pair::Argument alpha() { return {"alpha", nullptr, 1}; }

struct Binary {
  const char* name;
  const char* aten;
  bool (*accepts)(DType);
  int since;
  int bfloat16_since;
  bool commutes;
  FusedRule fused = {};
  bool gives_bool = false;
  bool has_alpha = false;
};

constexpr Binary kBinary[] = {
    {"Add", "aten::add", is_number, 7, 13, true, Pointwise::kAdd, false, true},
    {"And", "aten::logical_and", is_bool, 7, 7, true, Pointwise::kAnd, true},
    {"BitwiseAnd", "aten::bitwise_and", is_integer, 18, 18, true},
    {"BitwiseOr", "aten::bitwise_or", is_integer, 18, 18, true},
    {"BitwiseXor", "aten::bitwise_xor", is_integer, 18, 18, true},
    // PyTorch's quotient of integers is a float.
    {"Div", "aten::div", is_float, 7, 13, false, Pointwise::kDiv},
    {"Equal", "aten::eq", is_number_or_bool, 11, 13, true, Pointwise::kEqual, true},
    {"Greater", "aten::gt", is_number, 9, 13, false, Pointwise::kGreater, true},
    {"GreaterOrEqual", "aten::ge", is_number, 12, 16, false, Pointwise::kGreaterOrEqual, true},
    {"Less", "aten::lt", is_number, 9, 13, false, Pointwise::kLess, true},
    {"LessOrEqual", "aten::le", is_number, 12, 16, false, Pointwise::kLessOrEqual, true},
    {"Mod", "aten::remainder", is_integer, 10, 13, false},
    {"Mul", "aten::mul", is_number, 7, 13, true, Pointwise::kMul},
    {"Or", "aten::logical_or", is_bool, 7, 7, true, Pointwise::kOr, true},
    {"Sub", "aten::sub", is_number, 7, 13, false, Pointwise::kSub, false, true},
    {"Xor", "aten::logical_xor", is_bool, 7, 7, true, Pointwise::kXor, true},
};

Pair pair_of(const Binary& row) {
  Pair pair{.aten = row.aten, .accepts = row.accepts, .form = Pair::Form::kOperands};
  if (row.gives_bool) pair.gives = DType::kBool;
  // Logical operators have one overload, which has no name, and take no number.
  if (row.accepts != is_bool) pair.overloads = both();
  if (row.has_alpha) pair.arguments = {alpha()};
  return pair;
}

const Binary& row_of(const Node& node) {
  const Binary* row = std::find_if(std::begin(kBinary), std::end(kBinary),
                                   [&](const Binary& each) { return node.op.name == each.name; });
  ORT_CHECK(row != std::end(kBinary), "ops: no row for ", node.op.str());
  return *row;
}

std::vector<Type> infer_binary(const Node& node) {
  want_same_dtype(node, {0, 1});
  const DType dtype = gives_bool(node) ? DType::kBool : input(node, 0).type.dtype;
  return {type_like_inputs(node, dtype, broadcast_inputs(node))};
}

// In ONNX the quotient of integers is truncated, as in C.
bool is_integer_division(const Node& node) {
  return node.op.name == "Div" && !is_float(input(node, 0).type.dtype);
}

void lower_binary(const Node& node, CallList& calls) {
  const bool is_fmod = node.op.name == "Mod" && ir::int_attr(node.attrs, "fmod", 0) != 0;
  const Pair& pair = pairs_of(node).at(is_fmod ? 1 : 0);
  Value *a = &input(node, 0), *b = &input(node, 1);
  if (row_of(node).commutes && scalar_of(a) && !scalar_of(b)) std::swap(a, b);
  const std::optional<Arg> number = scalar_of(a) ? std::nullopt : scalar_of(b);
  const bool takes_number = number && pair.overloads.size() > 1;

  ArgList args = {a, takes_number ? *number : Arg(b)};
  std::string overload = pair.overloads.at(takes_number ? 1 : 0);
  for (const Pair::Argument& argument : pair.arguments) args.push_back(argument.value);
  if (is_integer_division(node)) {
    overload += "_mode";
    args.push_back("trunc");
  }
  calls.add(pair.aten, std::move(overload), std::move(args), {node.outputs[0]});
}

int binary_since(const Node& node) {
  const int since = registry().find(node.op)->since;
  const bool is_arithmetic = since == 7 && !gives_bool(node);
  return is_arithmetic && is_small_integer(input(node, 0).type.dtype) ? 14 : since;
}

// The result has the dtype of the base, whatever the dtype of the exponent is.
std::vector<Type> infer_pow(const Node& node) {
  return {type_like_inputs(node, input(node, 0).type.dtype, broadcast_inputs(node))};
}

// An integer to the power of a float is computed in the float's dtype, and rounded towards zero.
void lower_integer_to_float(const Node& node, CallList& calls) {
  const DType dtype = input(node, 1).type.dtype;
  Type type = with_shape(node.outputs[0]->type, node.outputs[0]->type.shape);
  type.dtype = dtype;
  Value* power = calls.temporary(type);
  calls.add("aten::pow", "Tensor_Tensor", {cast(calls, &input(node, 0), dtype), &input(node, 1)},
            {power});
  calls.add("aten::_to_copy", "",
            {power, ir::name(input(node, 0).type.dtype), Arg(), Arg(), Arg(), false, Arg()},
            {node.outputs[0]});
}

void lower_pow(const Node& node, CallList& calls) {
  Value *base = &input(node, 0), *exponent = &input(node, 1);
  const DType dtype = base->type.dtype;
  if (!is_float(dtype) && is_float(exponent->type.dtype)) {
    lower_integer_to_float(node, calls);
    return;
  }
  const std::optional<Arg> base_number = scalar_of(base), number = scalar_of(exponent);
  if (number && !base_number) {
    calls.add("aten::pow", "Tensor_Scalar", {base, *number}, {node.outputs[0]});
    return;
  }
  exponent = cast(calls, exponent, dtype);
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
  const std::string& aten = pairs_of(node)[0].aten;
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

// The greatest finite number of a type of 8 bits; nothing for other types.
std::optional<double> greatest_of_8_bits(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3FN: return 448.0;
    case DType::kFloat8E4M3FNUZ: return 240.0;
    case DType::kFloat8E5M2:
    case DType::kFloat8E5M2FNUZ: return 57344.0;
    default: return std::nullopt;
  }
}

void lower_cast(const Node& node, CallList& calls) {
  Value* x = &input(node, 0);
  const DType to = cast_target(node);
  // ONNX gives the greatest number for what is beyond it, unless the node says otherwise. PyTorch
  // gives NaN, infinity, or in float8_e4m3fn the same.
  const std::optional<double> greatest = greatest_of_8_bits(to);
  const bool is_from_float = greatest && is_float(x->type.dtype);
  const bool saturates = ir::int_attr(node.attrs, "saturate", 1) != 0;
  if (is_from_float && !saturates && to == DType::kFloat8E4M3FN) {
    throw Unsupported("Cast: saturate: got 0 for float8_e4m3fn, want 1");
  }
  if (is_from_float && saturates) {
    Value* bounded = calls.temporary(with_shape(x->type, x->type.shape));
    calls.add("aten::clamp", "", {x, -*greatest, *greatest}, {bounded});
    x = bounded;
  }
  calls.add("aten::_to_copy", "", {x, ir::name(to), Arg(), Arg(), Arg(), false, Arg()},
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
  const DType from = node.inputs[0]->type.dtype, to = node.outputs[0]->type.dtype;
  if (!is_number_or_bool(from) || !is_number_or_bool(to)) return {};
  if (to == DType::kBool) return {FusedForm::Kind::kPointwise, Pointwise::kToBool, {}};
  if (is_float(to) || from == DType::kBool || from == to) return {FusedForm::Kind::kPass};
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
    unary.pairs = {{.aten = row.aten, .accepts = row.accepts}};
    if (row.gives_bool) unary.pairs[0].gives = DType::kBool;
    if (unary.name == "Not") unary.pairs.push_back({"aten::bitwise_not", is_bool});
    unary.work.fused = row.fused;
    if (unary.name == "IsInf") {
      unary.attributes = {{"detect_negative", kInt}, {"detect_positive", kInt}};
    }
    ops.add(unary);
  }
  // What computes the same for some dtypes, or with the operands in the opposite order.
  const auto of_bools = [](const char* aten) {
    return Pair{aten, is_bool, Pair::Form::kOperands, DType::kBool, both()};
  };
  const std::pair<const char*, Pair> others[] = {
      {"And", of_bools("aten::bitwise_and")},
      {"Mod",
       {.aten = "aten::fmod",
        .accepts = is_number,
        .form = Pair::Form::kOperands,
        .overloads = both(),
        .attrs = {{"fmod", Dim(1)}}}},
      {"Or", of_bools("aten::bitwise_or")},
      {"Sub",
       {.aten = "aten::rsub",
        .accepts = is_number,
        .form = Pair::Form::kReversed,
        .overloads = both(),
        .arguments = {alpha()}}},
      {"Xor", of_bools("aten::bitwise_xor")},
  };
  for (const Binary& row : kBinary) {
    Op binary = op(row.name, 2, row.since, row.bfloat16_since, infer_binary, lower_binary);
    binary.since_of = binary_since;
    binary.pairs = {pair_of(row)};
    for (const auto& [name, pair] : others) {
      if (binary.name == name) binary.pairs.push_back(pair);
    }
    binary.work.fused = row.fused;
    if (binary.name == "Mod") binary.attributes = {{"fmod", kInt}};
    ops.add(binary);
  }
  Op pow = op("Pow", 2, 12, 15, infer_pow, lower_pow);
  pow.pairs = {{.aten = "aten::pow",
                .accepts = is_summable,
                .form = Pair::Form::kOperands,
                .overloads = {"Tensor_Tensor", "Tensor_Scalar", "Scalar"}}};
  pow.work.fused = Pointwise::kPow;
  ops.add(pow);
  const std::tuple<const char*, const char*, Pointwise> kExtrema[] = {
      {"Max", "aten::maximum", Pointwise::kMax}, {"Min", "aten::minimum", Pointwise::kMin}};
  for (const auto& [name, aten, fused] : kExtrema) {
    Op extremum = op(name, 1, 12, 13, infer_extremum, lower_extremum);
    extremum.max_inputs = -1;
    extremum.pairs = {{aten, is_number, Pair::Form::kOperands}};
    extremum.work.fused = fused;
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
  ops.add(Operator{.name = "aten::log1p", .work = {.fused = Pointwise::kLog1p}});
  ops.add(Operator{.name = "aten::sgn", .work = {.fused = Pointwise::kSign}});
  ops.add(Operator{.name = "aten::trunc", .work = {.fused = Pointwise::kTrunc}});
}

}  // namespace torch_ort::ops
