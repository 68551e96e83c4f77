// Element-wise arithmetic, comparisons, choices and casts, and all pairs of tensors (ops/pair.h).
// ONNX wants operands of one dtype. Where PyTorch widens one to the dtype of the other, a Cast does
// so; calls that mix dtypes in other ways stay as they are.

#include "convert/families.h"
#include "convert/rows.h"
#include "ops/dtypes.h"

#include <algorithm>

namespace torch_ort::convert {

namespace {

using ir::DType;
using ir::Value;
using Values = std::vector<Value*>;

using Accepts = bool (*)(DType);
using ops::is_bool;
using ops::Pair;

// Whether the result has the dtype that the op gives for operands of this one.
bool gives(const Pair& pair, const AtenCall& call, DType operands) {
  return call.types[0].dtype == (pair.gives == DType::kUndefined ? operands : pair.gives);
}

// Whether the op can say the argument; what says it is added to the attributes. `x` is the first
// tensor.
bool say(const Pair::Argument& argument, const AtenCall& call, const Value* x, ir::Attrs& attrs) {
  const ops::Arg& given = call.arg(argument.name);
  if (argument.attribute == nullptr) {
    return is_number(given) && number(given) == number(argument.value);
  }
  ir::Attr& said = attrs[argument.attribute];
  if (argument.is_axis) {
    if (given.is_none() || !x->type.shape || x->type.shape->empty()) return false;
    said = ir::Dim(axis(call, argument.name, x->type.shape->size()));
  } else if (const auto* missing = std::get_if<std::string>(&argument.value.value)) {
    said = text(given, *missing);
  } else if (std::holds_alternative<bool>(argument.value.value)) {
    said = ir::Dim(boolean(given) ? 1 : 0);
  } else {
    if (!is_number(given)) return false;
    said = number(given);
  }
  return true;
}

// The attributes of the op, with all that the call says after the tensors; nothing if the op cannot
// say it.
std::optional<ir::Attrs> attributes(const Pair& pair, const AtenCall& call, const Value* x) {
  ir::Attrs attrs = pair.attrs;
  for (const Pair::Argument& argument : pair.arguments) {
    if (!say(argument, call, x, attrs)) return std::nullopt;
  }
  return attrs;
}

Values of_tensors(Builder& builder, const AtenCall& call, const ops::Op& op, const Pair& pair) {
  Values inputs;
  for (int i = 0; i < op.min_inputs; ++i) {
    inputs.push_back(tensor(call.args.at(static_cast<size_t>(i))));
    if (inputs[i] == nullptr || inputs[i]->type.dtype != inputs[0]->type.dtype) return {};
    // What becomes of several tensors depends on their shapes.
    if (op.min_inputs > 1 && !inputs[i]->type.shape) return {};
  }
  const DType dtype = inputs[0]->type.dtype;
  if (!pair.accepts(dtype) || !gives(pair, call, dtype)) return {};
  std::optional<ir::Attrs> attrs = attributes(pair, call, inputs[0]);
  return attrs ? standard(builder, op.name, std::move(inputs), call.types, std::move(*attrs))
               : Values();
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

Values of_operands(Builder& builder, const AtenCall& call, const ops::Op& op, const Pair& pair) {
  std::optional<ir::Attrs> attrs = attributes(pair, call, nullptr);
  if (!attrs) return {};
  const size_t first = pair.form == Pair::Form::kReversed ? 1 : 0;
  Values inputs = operands(builder, call.args.at(first), call.args.at(1 - first), pair.accepts);
  if (inputs.empty() || !gives(pair, call, inputs[0]->type.dtype)) return {};
  return standard(builder, op.name, std::move(inputs), call.types, std::move(*attrs));
}

Values not_equal(Builder& builder, const AtenCall& call) {
  Values inputs = operands(builder, call.args.at(0), call.args.at(1), ir::is_number_or_bool);
  if (inputs.empty()) return {};
  ir::Type type = call.types[0];
  type.strides.reset();
  Values equal = standard(builder, "Equal", inputs, {type});
  return equal.empty() ? equal : standard(builder, "Not", equal, call.types);
}

// ---- choices

Values where(Builder& builder, const AtenCall& call) {
  Value* condition = tensor(call.arg("condition"));
  if (condition == nullptr || !is_bool(condition->type.dtype)) return {};
  Values inputs = operands(builder, call.arg("self"), call.arg("other"), ir::is_number_or_bool);
  if (inputs.empty() || call.types[0].dtype != inputs[0]->type.dtype) return {};
  inputs.insert(inputs.begin(), condition);
  return standard(builder, "Where", inputs, call.types);
}

Values masked_fill(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *mask = tensor(call.arg("mask"));
  if (x == nullptr || mask == nullptr || !is_bool(mask->type.dtype)) return {};
  const Value* filling = tensor(call.arg("value"));
  if (filling != nullptr && common_dtype(*filling, *x) != x->type.dtype) return {};
  Values inputs = operands(builder, call.arg("value"), call.arg("self"), ir::is_number_or_bool);
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
    if (x == nullptr || !ir::is_number(x->type.dtype)) return {};
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

Values prelu(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *slope = tensor(call.arg("weight"));
  if (x == nullptr || slope == nullptr || !is_float(x->type.dtype)) return {};
  if (call.types[0].dtype != x->type.dtype || slope->type.dtype != x->type.dtype) return {};
  if (!x->type.shape || !slope->type.shape) return {};
  if (slope->type.shape->size() > x->type.shape->size()) return {};
  return standard(builder, "PRelu", {x, slope}, call.types);
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
  if (x == nullptr || !ir::is_number_or_bool(x->type.dtype) || !ir::is_number_or_bool(to))
    return {};
  if (to == x->type.dtype || !is_plain_cast(call, x->type)) return {};
  return standard(builder, "Cast", {x}, call.types, {{"to", ir::Dim(static_cast<int64_t>(to))}});
}

}  // namespace

void add_elementwise(Table& table) {
  add_pairs(table, Pair::Form::kTensors, of_tensors);
  add_pairs(table, Pair::Form::kOperands, of_operands);
  add_pairs(table, Pair::Form::kReversed, of_operands);
  table.add("aten::ne.Scalar", not_equal);
  table.add("aten::ne.Tensor", not_equal);
  table.add("aten::where.self", where);
  table.add("aten::masked_fill.Scalar", masked_fill);
  table.add("aten::masked_fill.Tensor", masked_fill);
  table.add("aten::clamp", clip("min", "max"));
  table.add("aten::clamp_min", clip("min", ""));
  table.add("aten::clamp_max", clip("", "max"));
  table.add("aten::hardtanh", clip("min_val", "max_val"));
  table.add("aten::_prelu_kernel", prelu);
  table.add("aten::_to_copy", to_copy);
}

}  // namespace torch_ort::convert
