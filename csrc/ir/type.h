// The type of a tensor: what is known of it without its data.
#pragma once

#include "ir/dim.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torch_ort::ir {

// The numbers are those of onnx.TensorProto.DataType.
enum class DType : int32_t {
  kUndefined = 0,
  kFloat = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kUInt16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kString = 8,
  kBool = 9,
  kHalf = 10,
  kDouble = 11,
  kUInt32 = 12,
  kUInt64 = 13,
  kComplex64 = 14,
  kComplex128 = 15,
  kBFloat16 = 16,
  kFloat8E4M3FN = 17,
  kFloat8E4M3FNUZ = 18,
  kFloat8E5M2 = 19,
  kFloat8E5M2FNUZ = 20,
};

int64_t size_bytes(DType dtype);  // of one element; InternalError if undefined
// Whether it is one of the floating-point types that PyTorch trains with.
bool is_float(DType dtype);
bool is_short_float(DType dtype);  // bfloat16 or float16
// Whether it is one of the integers that PyTorch computes with: signed ones, and uint8.
bool is_integer(DType dtype);
bool is_number(DType dtype);                   // is_float or is_integer
bool is_number_or_bool(DType dtype);           // is_number, or bool
const char* name(DType dtype);                 // PyTorch's name, such as "float32"
DType dtype_from_name(std::string_view name);  // Unsupported if ONNX has no such type

struct Device {
  std::string kind = "cpu";  // "cpu", "cuda", ...
  int index = -1;            // -1: the current one
  bool operator==(const Device&) const = default;
};

// Whether the device is the host's memory, which holds the data of initializers.
bool is_host(const Device& device);
std::string to_string(const Device& device);     // "cuda:0", "cpu"
Device device_from_text(std::string_view text);  // UserError on other text

struct Type {
  DType dtype = DType::kUndefined;  // kUndefined: known only at run time
  std::optional<Shape> shape;       // nothing: known only at run time
  // The strides, in elements, of the tensor that the kernel returns. Nothing: row-major.
  std::optional<Shape> strides;
  Device device;

  bool is_known() const { return dtype != DType::kUndefined && shape.has_value(); }
  bool operator==(const Type&) const = default;
};

std::string to_string(const Type& type);  // "float32[N,128]"

}  // namespace torch_ort::ir
