// Ops that make tensors from numbers: constants, filled tensors, ranges.

#include "ops/creation.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Type;
using enum AttrKind;

Type cpu_type(DType dtype, std::optional<Shape> shape) {
  Type type;
  type.dtype = dtype;
  type.shape = std::move(shape);
  return type;
}

// ---- ConstantOfShape

std::shared_ptr<const ir::TensorData> fill_data(const Node& node) {
  auto attr = node.attrs.find("value");
  if (attr == node.attrs.end()) return scalar_data(0.0, DType::kFloat);
  auto data = std::get<std::shared_ptr<const ir::TensorData>>(attr->second);
  if (static_cast<int64_t>(data->num_bytes) != ir::size_bytes(data->dtype)) {
    throw UserError(concat("ConstantOfShape: value: got ", data->num_bytes, " bytes of ",
                           ir::name(data->dtype), ", want one element"));
  }
  return data;
}

std::vector<Type> infer_constant_of_shape(const Node& node) {
  const DType dtype = fill_data(node)->dtype;
  const ir::Value& shape = input(node, 0);
  if (!has_known_ints(&shape)) return {cpu_type(dtype, std::nullopt)};
  return {cpu_type(dtype, known_ints(&shape))};
}

void lower_constant_of_shape(const Node& node, CallList& calls) {
  const auto data = fill_data(node);
  calls.add("aten::full", "",
            {Arg::list(known_ints(&input(node, 0))), element(*data, 0), ir::name(data->dtype),
             Arg(), device_name(node.outputs[0]->type), Arg()},
            {node.outputs[0]});
}

// ---- Range

double real(const Arg& number) {
  if (const auto* dim = std::get_if<Dim>(&number.value))
    return static_cast<double>(dim->constant());
  return std::get<double>(number.value);
}

// A bound, which is a constant or a size.
std::optional<Arg> bound(const Node& node, size_t slot) {
  const ir::Value& value = input(node, slot);
  if (std::optional<Arg> number = known_number(&value)) {
    if (!std::holds_alternative<bool>(number->value)) return number;
    throw UserError(concat("Range: input ", slot, ": got a bool, want a number"));
  }
  if (!has_known_ints(&value)) return std::nullopt;
  const Shape sizes = known_ints(&value);
  return sizes.size() == 1 ? std::optional<Arg>(sizes[0]) : std::nullopt;
}

const Dim* integer(const std::optional<Arg>& number) {
  return number ? std::get_if<Dim>(&number->value) : nullptr;
}

bool is_constant(const std::optional<Arg>& number) {
  return number && (integer(number) == nullptr || integer(number)->is_constant());
}

std::vector<Type> infer_range(const Node& node) {
  const DType dtype = input(node, 0).type.dtype;
  const auto start = bound(node, 0), limit = bound(node, 1), delta = bound(node, 2);
  if (!is_constant(start) || !is_constant(limit) || !is_constant(delta)) {
    const Dim *from = integer(start), *to = integer(limit), *step = integer(delta);
    if (from == nullptr || to == nullptr || step == nullptr || !step->is_constant())
      return {cpu_type(dtype, Shape{Dim::symbol(node.outputs[0]->name + "_size")})};
    // Minus floor_div of the negated length rounds up.
    return {cpu_type(dtype, Shape{times(-1, floor_div(minus(*from, *to), *step))})};
  }
  if (real(*delta) == 0) throw UserError("Range: delta: got 0, want another number");
  const double size = std::ceil((real(*limit) - real(*start)) / real(*delta));
  // The size must be below 2^63, and not NaN.
  if (!(size < 9223372036854775807.0)) {
    throw UserError(concat("Range: number of elements: got ", size, ", want one that can be made"));
  }
  return {cpu_type(dtype, Shape{static_cast<int64_t>(std::max(size, 0.0))})};
}

void lower_range(const Node& node, CallList& calls) {
  const auto number = [&](size_t slot) {
    std::optional<Arg> known = bound(node, slot);
    if (!known)
      throw Unsupported(
          concat("Range: '", node.inputs[slot]->name, "' depends on data, want a constant"));
    return *known;
  };
  const Type& type = node.outputs[0]->type;
  // PyTorch rejects a range whose step leads away from its end; in ONNX it is empty.
  if (type.shape && *type.shape == Shape{0}) {
    calls.add("aten::full", "",
              {Arg::list(Shape{0}), 0, ir::name(type.dtype), Arg(), device_name(type), Arg()},
              {node.outputs[0]});
    return;
  }
  calls.add(
      "aten::arange", "start_step",
      {number(0), number(1), number(2), ir::name(type.dtype), Arg(), device_name(type), Arg()},
      {node.outputs[0]});
}

// ---- Constant

std::vector<Type> infer_constant(const Node& node) {
  const auto data = constant_data(*node.outputs[0]);
  return {cpu_type(data->dtype, Shape(data->shape.begin(), data->shape.end()))};
}

void lower_constant(const Node& node, CallList& calls) {
  if (!is_read_as_tensor(*node.outputs[0])) return;
  ir::Value* data = calls.temporary(node.outputs[0]->type);
  data->data = constant_data(*node.outputs[0]);
  // A copy, because the result may be overwritten whereas the constant is used by all runs.
  calls.add("aten::clone", "", {data, "contiguous_format"}, {node.outputs[0]});
}

ArgList nothing(const ArgList&) { return {}; }
ArgList ones(const ArgList&) { return {1}; }
ArgList second(const ArgList& args) { return {args.at(1)}; }
ArgList third(const ArgList& args) { return {args.at(2)}; }

constexpr const char *kZero = "aten::zero_", *kFill = "aten::fill_";

}  // namespace

bool fills_with_zeros(const Node& node) {
  const OverwriteForm& form = registry().operator_row(key_of(node)).overwrite;
  const std::string_view op = form.op == nullptr ? "" : form.op;
  if (op == kZero) return true;
  if (op != kFill) return false;
  const Arg number = form.args(decode_aten(node).args).at(0);
  const auto* integer = std::get_if<Dim>(&number.value);
  const auto* real = std::get_if<double>(&number.value);
  return (integer != nullptr && *integer == Dim(0)) ||
         (real != nullptr && *real == 0 && !std::signbit(*real));
}

void register_creation(Registry& ops) {
  Op constant;
  constant.name = "Constant";
  constant.min_inputs = constant.max_inputs = 0;
  constant.attributes = {{"value", kTensor},         {"value_float", kFloat},
                         {"value_floats", kFloats},  {"value_int", kInt},
                         {"value_ints", kInts},      {"value_string", kString},
                         {"value_strings", kStrings}};
  constant.since = 12;
  constant.infer = infer_constant;
  constant.lower = lower_constant;
  ops.add(constant);

  Op filled;
  filled.name = "ConstantOfShape";
  filled.attributes = {{"value", kTensor}};
  filled.since = 9;
  filled.infer = infer_constant_of_shape;
  filled.lower = lower_constant_of_shape;
  filled.bfloat16_since = 20;
  filled.int_inputs = {0};
  ops.add(filled);

  Op range;
  range.name = "Range";
  range.min_inputs = range.max_inputs = 3;
  range.attributes = {{"stash_type", kInt}};
  range.since = 11;
  range.infer = infer_range;
  range.lower = lower_range;
  range.bfloat16_since = 27;
  range.int_inputs = {0, 1, 2};  // inputs of floating point must be constants
  ops.add(range);

  for (const char* name : {"aten::empty", "aten::empty_like", "aten::empty_strided",
                           "aten::new_empty", "aten::new_empty_strided"}) {
    ops.add(Operator{.name = name, .is_uninitialized = true});
  }
  // PyTorch's kernel copies all memory that the first argument is a view of, and writes over it.
  ops.add(Operator{.name = aten::kCopyLike, .overwrite = {.op = aten::kCopy, .args = second}});
  for (const char* name : {"aten::new_zeros", "aten::zeros", "aten::zeros_like"}) {
    ops.add(Operator{.name = name, .overwrite = {.op = kZero, .args = nothing}});
  }
  const auto filled_with = [](ArgList (*args)(const ArgList&)) {
    return OverwriteForm{.op = kFill, .overload = "Scalar", .args = args};
  };
  ops.add(Operator{.name = "aten::full", .overwrite = filled_with(second)});
  ops.add(Operator{.name = "aten::full_like", .overwrite = filled_with(second)});
  ops.add(Operator{.name = "aten::new_full", .overwrite = filled_with(third)});
  ops.add(Operator{.name = "aten::ones", .overwrite = filled_with(ones)});
  ops.add(Operator{.name = "aten::ones_like", .overwrite = filled_with(ones)});
}

}  // namespace torch_ort::ops
