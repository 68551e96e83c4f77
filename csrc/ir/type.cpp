#include "ir/type.h"

#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace torch_ort::ir {

namespace {

struct DTypeFacts {
  const char* name;
  int64_t bytes;
};

// Indexed by DType.
constexpr DTypeFacts kDTypes[] = {
    {"undefined", 0},       {"float32", 4},       {"uint8", 1},           {"int8", 1},
    {"uint16", 2},          {"int16", 2},         {"int32", 4},           {"int64", 8},
    {"string", 0},          {"bool", 1},          {"float16", 2},         {"float64", 8},
    {"uint32", 4},          {"uint64", 8},        {"complex64", 8},       {"complex128", 16},
    {"bfloat16", 2},        {"float8_e4m3fn", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2", 1},
    {"float8_e5m2fnuz", 1},
};

const DTypeFacts& facts(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  ORT_CHECK(index < std::size(kDTypes), "dtype: got number ", index, ", want one below ",
            std::size(kDTypes));
  return kDTypes[index];
}

}  // namespace

int64_t size_bytes(DType dtype) {
  const DTypeFacts& found = facts(dtype);
  ORT_CHECK(found.bytes > 0, "dtype: got ", found.name, ", want one whose elements have a size");
  return found.bytes;
}

bool is_float(DType dtype) {
  return dtype == DType::kFloat || dtype == DType::kDouble || is_short_float(dtype);
}

bool is_short_float(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kHalf; }

bool is_integer(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kUInt8 || dtype == DType::kInt16 ||
         dtype == DType::kInt32 || dtype == DType::kInt64;
}

bool is_number(DType dtype) { return is_float(dtype) || is_integer(dtype); }

bool is_number_or_bool(DType dtype) { return is_number(dtype) || dtype == DType::kBool; }

const char* name(DType dtype) { return facts(dtype).name; }

DType dtype_from_name(std::string_view name) {
  auto has_name = [&](const DTypeFacts& facts) { return facts.name == name; };
  auto found = std::find_if(std::begin(kDTypes) + 1, std::end(kDTypes), has_name);
  if (found == std::end(kDTypes)) {
    throw Unsupported(
        concat("dtype: got '", name, "', want one that ONNX has, like float32 or int64"));
  }
  return static_cast<DType>(found - std::begin(kDTypes));
}

bool is_host(const Device& device) { return device.kind == "cpu"; }

std::string to_string(const Device& device) {
  return device.index < 0 ? device.kind : concat(device.kind, ":", device.index);
}

Device device_from_text(std::string_view text) {
  Device device;
  const size_t colon = text.find(':');
  device.kind = text.substr(0, colon);
  bool is_good = !device.kind.empty();
  if (colon != std::string_view::npos) {
    const char* end = text.data() + text.size();
    auto [stop, error] = std::from_chars(text.data() + colon + 1, end, device.index);
    is_good = is_good && error == std::errc() && stop == end && device.index >= 0;
  }
  if (!is_good) {
    throw UserError(concat("device: got '", text, "', want a form like cpu or cuda:0"));
  }
  return device;
}

std::string to_string(const Type& type) {
  return concat(name(type.dtype), type.shape ? to_string(*type.shape) : std::string("[...]"));
}

}  // namespace torch_ort::ir
