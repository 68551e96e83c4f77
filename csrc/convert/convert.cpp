// What all rows share: building nodes for a call, constants, and the ATen node for calls without a
// row.
#include "convert/convert.h"

#include "base/error.h"
#include "convert/rows.h"
#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/op.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace torch_ort::convert {

namespace {

template <typename T>
std::vector<std::byte> bytes_of(T value) {
  std::vector<std::byte> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <typename T>
std::vector<std::byte> integer_bytes(double value) {
  const bool fits = value == std::trunc(value) &&
                    value >= static_cast<double>(std::numeric_limits<T>::lowest()) &&
                    value <= static_cast<double>(std::numeric_limits<T>::max());
  // Beyond 2^53 doubles are not exact, and the limit of int64 is rounded to 2^63, which is too
  // large.
  if (!fits || std::abs(value) > 9007199254740992.0) return {};
  return bytes_of(static_cast<T>(value));
}

template <typename T>
std::vector<std::byte> half_bytes(double value) {
  const T half = static_cast<T>(static_cast<float>(value));
  if (static_cast<double>(static_cast<float>(half)) != value && !std::isnan(value)) return {};
  return bytes_of(half);
}

std::vector<std::byte> scalar_bytes(double value, ir::DType dtype) {
  switch (dtype) {
    case ir::DType::kFloat: return bytes_of(static_cast<float>(value));
    case ir::DType::kDouble: return bytes_of(value);
    case ir::DType::kHalf: return half_bytes<c10::Half>(value);
    case ir::DType::kBFloat16: return half_bytes<c10::BFloat16>(value);
    case ir::DType::kInt64: return integer_bytes<int64_t>(value);
    case ir::DType::kInt32: return integer_bytes<int32_t>(value);
    case ir::DType::kInt16: return integer_bytes<int16_t>(value);
    case ir::DType::kInt8: return integer_bytes<int8_t>(value);
    case ir::DType::kUInt8: return integer_bytes<uint8_t>(value);
    case ir::DType::kBool:
      return value == 0.0 || value == 1.0 ? bytes_of(static_cast<uint8_t>(value))
                                          : std::vector<std::byte>();
    default: return {};
  }
}

int64_t known(const ir::Dim& dim) {
  if (!dim.is_constant()) throw AskedForSymbol();
  return dim.constant();
}

}  // namespace

const ops::Arg& AtenCall::arg(std::string_view name) const {
  for (size_t i = 0; i < args.size(); ++i) {
    if (arg_names[i] == name) return args[i];
  }
  throw InternalError(concat("convert ", key(), ": no argument '", name, "'"));
}

std::vector<ir::Value*> Builder::node(std::string_view op, std::vector<ir::Value*> inputs,
                                      const std::vector<ir::Type>& types, ir::Attrs attrs) {
  return node(ir::OpId{"", std::string(op)}, std::move(inputs), types, std::move(attrs));
}

std::vector<ir::Value*> Builder::node(ir::OpId op, std::vector<ir::Value*> inputs,
                                      const std::vector<ir::Type>& types, ir::Attrs attrs) {
  return add(std::move(op), std::move(inputs), types, std::move(attrs)).outputs;
}

ir::Node& Builder::add(ir::OpId op, std::vector<ir::Value*> inputs,
                       const std::vector<ir::Type>& types, ir::Attrs attrs) {
  if (call_ == nullptr) {
    return Writer::add(std::move(op), std::move(inputs), types, std::move(attrs));
  }
  ir::Node& added =
      add_named(call_->name, std::move(op), std::move(inputs), types, std::move(attrs));
  added.origin = call_->origin;
  added.recompute = call_->recompute;
  added.checkpoint = call_->checkpoint;
  return added;
}

ir::Value* Builder::scalar(double value, ir::DType dtype) {
  std::vector<std::byte> bytes = scalar_bytes(value, dtype);
  if (bytes.empty()) return nullptr;
  std::string key = concat(ir::name(dtype), ":");
  key.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  ir::Value*& constant = constants_[key];
  if (constant == nullptr) {
    constant = &ir::add_initializer(graph(), "constant", {.dtype = dtype, .shape = ir::Shape{}},
                                    ir::make_tensor_data(dtype, {}, std::move(bytes)));
  }
  return constant;
}

ir::Value* Builder::ints(const ir::Shape& dims) {
  // A Dims node is written where it is read. An earlier one that backward reads would cross the
  // border.
  if (!ir::is_constant(dims)) return Writer::ints(dims);
  ir::Value*& constant = constants_["ints:" + ir::to_string(dims)];
  if (constant == nullptr) constant = Writer::ints(dims);
  return constant;
}

ir::Value* Builder::reduce(std::string_view op, ir::Value* x, const ir::Shape& axes,
                           bool keeps_dims) {
  return convert::reduce(*this, op, x, axes, keeps_dims, {ir::Type()}).at(0);
}

std::vector<ir::Value*> convert_to_aten(Builder& builder, const AtenCall& call) {
  std::vector<ir::Value*> inputs;
  ir::Attrs attrs;
  ops::encode_aten(call.op, call.overload, call.arg_names, call.args, inputs, attrs);
  const auto op = c10::Dispatcher::singleton().findSchema({call.op, call.overload});
  if (!op) {
    throw Unsupported(concat("operator ", call.key(), ": no such operator is registered"));
  }
  ops::add_facts(*op, attrs);
  if (!call.binds_symbol.empty()) attrs["binds_symbol"] = call.binds_symbol;
  return builder.node(ir::OpId{ir::kAtenDomain, "ATen"}, std::move(inputs), call.types,
                      std::move(attrs));
}

std::vector<ir::Value*> apply(const Row& row, Builder& builder, const AtenCall& call) {
  try {
    return row(builder, call);
  } catch (const AskedForSymbol&) {
    return {};
  }
}

std::vector<ir::Value*> convert(Builder& builder, const AtenCall& call) {
  const Builder::Scope scope(builder, call);
  if (const Row* row = table().find(call.key())) {
    std::vector<ir::Value*> values = apply(*row, builder, call);
    if (!values.empty()) {
      ORT_CHECK(values.size() == call.types.size(), "convert ", call.key(), ": got ", values.size(),
                " values, want ", call.types.size());
      return values;
    }
  }
  return convert_to_aten(builder, call);
}

ir::Value* tensor(const ops::Arg& arg) {
  auto* value = std::get_if<ir::Value*>(&arg.value);
  return value == nullptr ? nullptr : *value;
}

bool is_number(const ops::Arg& arg) {
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) return dim->is_constant();
  return std::holds_alternative<double>(arg.value) || std::holds_alternative<bool>(arg.value);
}

double number(const ops::Arg& arg) {
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) return static_cast<double>(known(*dim));
  if (auto* flag = std::get_if<bool>(&arg.value)) return *flag ? 1.0 : 0.0;
  if (auto* real = std::get_if<double>(&arg.value)) return *real;
  throw InternalError("convert: the argument is no number");
}

ir::Shape dims(const ops::Arg& arg) {
  if (arg.is_none()) return {};
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) return {*dim};
  ir::Shape shape;
  for (const ops::Arg& item : std::get<ops::ArgList>(arg.value)) {
    shape.push_back(std::get<ir::Dim>(item.value));
  }
  return shape;
}

int64_t integer(const ops::Arg& arg) { return known(std::get<ir::Dim>(arg.value)); }

bool boolean(const ops::Arg& arg) {
  if (auto* dim = std::get_if<ir::Dim>(&arg.value)) return known(*dim) != 0;
  return std::get<bool>(arg.value);
}

std::string text(const ops::Arg& arg, std::string_view missing) {
  if (auto* given = std::get_if<std::string>(&arg.value)) return *given;
  return std::string(missing);
}

}  // namespace torch_ort::convert
