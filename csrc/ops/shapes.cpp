#include "ops/shapes.h"

#include "base/error.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace torch_ort::ops {

using ir::Dim;
using ir::DimOp;
using ir::DType;

Dim plus(const Dim& a, const Dim& b) { return Dim::make(DimOp::kAdd, a, b); }
Dim minus(const Dim& a, const Dim& b) { return Dim::make(DimOp::kSub, a, b); }
Dim times(const Dim& a, const Dim& b) { return Dim::make(DimOp::kMul, a, b); }
Dim floor_div(const Dim& a, const Dim& b) { return Dim::make(DimOp::kFloorDiv, a, b); }
Dim ceil_div(const Dim& a, const Dim& b) { return floor_div(plus(a, minus(b, 1)), b); }

bool has_input(const ir::Node& node, size_t slot) {
  return slot < node.inputs.size() && node.inputs[slot] != nullptr;
}

ir::Value& input(const ir::Node& node, size_t slot) {
  if (!has_input(node, slot)) {
    throw UserError(concat(node.op.str(), ": input ", slot, " is missing"));
  }
  return *node.inputs[slot];
}

std::string device_name(const ir::Type& type) {
  if (type.device.index < 0) return type.device.kind;
  return concat(type.device.kind, ":", type.device.index);
}

const ir::Shape& known_shape(const ir::Node& node, const ir::Value& value) {
  if (!value.type.shape) {
    throw Unsupported(
        concat(node.op.str(), ": the shape of '", value.name, "' is unknown before the run"));
  }
  return *value.type.shape;
}

ir::Type with_shape(const ir::Type& type, std::optional<ir::Shape> shape) {
  ir::Type result;
  result.dtype = type.dtype;
  result.device = type.device;
  result.shape = std::move(shape);
  return result;
}

std::vector<ir::Type> infer_like_first(const ir::Node& node) {
  const ir::Type& type = input(node, 0).type;
  return {with_shape(type, type.shape)};
}

ir::Shape strides_of(const ir::Type& type) {
  return type.strides ? *type.strides : ir::contiguous_strides(*type.shape);
}

bool repeats_elements(const ir::Type& type) {
  if (!type.strides || !type.shape) return false;
  for (size_t i = 0; i < type.strides->size(); ++i) {
    if ((*type.strides)[i] == ir::Dim(0) && !((*type.shape)[i] == ir::Dim(1))) return true;
  }
  return false;
}

ir::Type view_type(const ir::Type& base, ir::Shape shape, const ir::Shape& strides) {
  ir::Type type = with_shape(base, std::move(shape));
  if (!(strides == ir::contiguous_strides(*type.shape))) type.strides = strides;
  return type;
}

ir::Type expanded_type(const ir::Type& type, ir::Shape to) {
  const ir::Shape &from = *type.shape, old = strides_of(type);
  if (from.size() > to.size()) {
    throw UserError(concat("expand: got ", ir::to_string(from), ", want at most the ", to.size(),
                           " dims of ", ir::to_string(to)));
  }
  ir::Shape strides(to.size(), Dim(0));
  const size_t offset = to.size() - from.size();
  for (size_t i = to.size(); i-- > 0;) {
    const Dim size = i < offset ? Dim(1) : from[i - offset];
    // The dim repeats one element.
    if (!(size == to[i])) continue;
    if (i >= offset)
      strides[i] = old[i - offset];
    else
      strides[i] = i + 1 < to.size() ? times(to[i + 1], strides[i + 1]) : Dim(1);
  }
  return view_type(type, std::move(to), strides);
}

int64_t wrap_axis(const ir::Node& node, int64_t axis, int64_t rank) {
  if (axis < -rank || axis >= rank) {
    throw UserError(concat(node.op.str(), ": axis out of range: got ", axis, ", want at least ",
                           -rank, " and less than ", rank));
  }
  return axis < 0 ? axis + rank : axis;
}

std::vector<int64_t> wrap_axes(const ir::Node& node, const ir::Shape& axes, int64_t rank) {
  std::vector<int64_t> wrapped;
  for (const Dim& axis : axes) {
    if (!axis.is_constant()) {
      throw Unsupported(concat(node.op.str(), ": axis: got '", axis.str(), "', want a constant"));
    }
    wrapped.push_back(wrap_axis(node, axis.constant(), rank));
  }
  return wrapped;
}

Dim same_dim(const ir::Node& node, const Dim& a, const Dim& b) {
  if (a.is_constant() && b.is_constant() && a.constant() != b.constant()) {
    throw UserError(concat(node.op.str(), ": dims differ: got ", b.str(), ", want ", a.str()));
  }
  return b.is_constant() ? b : a;
}

namespace {

template <typename T>
T read(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

double from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

double from_half(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  if (exponent == 0x1f) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(fraction + 0x400, exponent - 25);
}

// The bits of a number that bfloat16 represents exactly; nothing for other numbers.
std::optional<uint16_t> to_bfloat16(double number) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(number));
  const auto high = static_cast<uint16_t>(bits >> 16);
  if (from_bfloat16(high) != number) return std::nullopt;
  return high;
}

std::optional<uint16_t> to_half(double number) {
  const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
  const double size = std::fabs(number);
  if (std::isinf(number)) return static_cast<uint16_t>(sign | 0x7c00);
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  // The unit of the last bit is 2^-24 for the smallest numbers, and 2^(exponent - 11) for others.
  const int unit = std::max(exponent - 11, -24);
  const double steps = std::ldexp(size, -unit);
  if (exponent > 16 || steps != std::floor(steps)) return std::nullopt;
  const auto whole = static_cast<uint16_t>(steps);
  if (whole < 0x400) return static_cast<uint16_t>(sign | whole);
  return static_cast<uint16_t>(sign | ((unit + 25) << 10) | (whole - 0x400));
}

double as_double(const Arg& number) {
  if (const auto* flag = std::get_if<bool>(&number.value)) return *flag ? 1.0 : 0.0;
  if (const auto* dim = std::get_if<Dim>(&number.value))
    return static_cast<double>(dim->constant());
  return std::get<double>(number.value);
}

std::optional<int64_t> as_integer(const Arg& number) {
  if (const auto* flag = std::get_if<bool>(&number.value)) return *flag ? 1 : 0;
  if (const auto* dim = std::get_if<Dim>(&number.value)) return dim->constant();
  const double real = std::get<double>(number.value);
  if (real != std::floor(real) || std::fabs(real) > 9007199254740992.0) return std::nullopt;
  return static_cast<int64_t>(real);
}

template <typename T>
std::shared_ptr<const ir::TensorData> scalar_of(DType dtype, T value) {
  std::vector<std::byte> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return ir::make_tensor_data(dtype, {}, std::move(bytes));
}

template <typename T>
std::shared_ptr<const ir::TensorData> integer_of(DType dtype, const Arg& number) {
  const std::optional<int64_t> value = as_integer(number);
  if (!value || static_cast<int64_t>(static_cast<T>(*value)) != *value) return nullptr;
  return scalar_of(dtype, static_cast<T>(*value));
}

}  // namespace

Arg element(const ir::TensorData& data, int64_t index) {
  const std::byte* bytes = data.bytes + index * ir::size_bytes(data.dtype);
  switch (data.dtype) {
    case DType::kBool: return read<uint8_t>(bytes) != 0;
    case DType::kUInt8: return static_cast<int64_t>(read<uint8_t>(bytes));
    case DType::kInt8: return static_cast<int64_t>(read<int8_t>(bytes));
    case DType::kInt16: return static_cast<int64_t>(read<int16_t>(bytes));
    case DType::kInt32: return static_cast<int64_t>(read<int32_t>(bytes));
    case DType::kInt64: return read<int64_t>(bytes);
    case DType::kFloat: return static_cast<double>(read<float>(bytes));
    case DType::kDouble: return read<double>(bytes);
    case DType::kHalf: return from_half(read<uint16_t>(bytes));
    case DType::kBFloat16: return from_bfloat16(read<uint16_t>(bytes));
    default:
      throw Unsupported(concat("constant: got ", ir::name(data.dtype), ", want a real number"));
  }
}

std::shared_ptr<const ir::TensorData> constant_data(const ir::Value& value) {
  if (!ir::is(value.producer, "Constant")) return value.data;
  const ir::Attrs& attrs = value.producer->attrs;
  if (auto attr = attrs.find("value"); attr != attrs.end()) {
    return std::get<std::shared_ptr<const ir::TensorData>>(attr->second);
  }
  if (ir::has_attr(attrs, "value_int"))
    return scalar_data(ir::int_attr(attrs, "value_int", 0), DType::kInt64);
  if (ir::has_attr(attrs, "value_float")) {
    return scalar_data(ir::float_attr(attrs, "value_float", 0), DType::kFloat);
  }
  if (ir::has_attr(attrs, "value_ints")) {
    std::vector<int64_t> values;
    for (const Dim& dim : ir::ints_attr(attrs, "value_ints", {})) values.push_back(dim.constant());
    return ir::make_int64_data(values);
  }
  if (auto attr = attrs.find("value_floats"); attr != attrs.end()) {
    const auto& doubles = std::get<std::vector<double>>(attr->second);
    const std::vector<float> values(doubles.begin(), doubles.end());
    std::vector<std::byte> bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return ir::make_tensor_data(DType::kFloat, {static_cast<int64_t>(values.size())},
                                std::move(bytes));
  }
  throw Unsupported(concat("Constant: '", value.name, "' holds no dense tensor of numbers"));
}

std::optional<Arg> known_number(const ir::Value* value) {
  if (value == nullptr) return std::nullopt;
  const std::shared_ptr<const ir::TensorData> data = constant_data(*value);
  if (data == nullptr || data->bytes == nullptr) return std::nullopt;
  for (int64_t size : data->shape) {
    if (size != 1) return std::nullopt;
  }
  return element(*data, 0);
}

std::vector<Arg> known_numbers(const ir::Node& node, const ir::Value& value) {
  const std::shared_ptr<const ir::TensorData> data = constant_data(value);
  if (data == nullptr || (data->bytes == nullptr && data->num_bytes > 0)) {
    throw Unsupported(
        concat(node.op.str(), ": '", value.name, "' depends on data, want a constant"));
  }
  std::vector<Arg> numbers;
  const auto count = static_cast<int64_t>(data->num_bytes) / ir::size_bytes(data->dtype);
  for (int64_t i = 0; i < count; ++i) numbers.push_back(element(*data, i));
  return numbers;
}

std::shared_ptr<const ir::TensorData> scalar_data(const Arg& number, DType dtype) {
  switch (dtype) {
    case DType::kBool: return scalar_of<uint8_t>(dtype, as_double(number) != 0 ? 1 : 0);
    case DType::kUInt8: return integer_of<uint8_t>(dtype, number);
    case DType::kInt8: return integer_of<int8_t>(dtype, number);
    case DType::kInt16: return integer_of<int16_t>(dtype, number);
    case DType::kInt32: return integer_of<int32_t>(dtype, number);
    case DType::kInt64: return integer_of<int64_t>(dtype, number);
    case DType::kFloat: return scalar_of(dtype, static_cast<float>(as_double(number)));
    case DType::kDouble: return scalar_of(dtype, as_double(number));
    case DType::kHalf:
    case DType::kBFloat16: {
      const auto bits =
          dtype == DType::kHalf ? to_half(as_double(number)) : to_bfloat16(as_double(number));
      return bits ? scalar_of(dtype, *bits) : nullptr;
    }
    default: return nullptr;
  }
}

}  // namespace torch_ort::ops
