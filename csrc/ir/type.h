// What is known of a tensor without its data: element type, shape, layout, device.
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

int64_t size_bytes(DType dtype);               // of one element; InternalError if undefined
bool is_float(DType dtype);                    // one of those that PyTorch trains with
const char* name(DType dtype);                 // PyTorch's name: "float32", "bfloat16", "bool"
DType dtype_from_name(std::string_view name);  // Unsupported where ONNX has none of this name

struct Device {
  std::string kind = "cpu";  // "cpu", "cuda", ...
  int index = -1;            // -1: the current one
  bool operator==(const Device&) const = default;
};

// Where the data of initializers stands.
bool is_host(const Device& device);
std::string to_string(const Device& device);     // "cuda:0", "cpu"
Device device_from_text(std::string_view text);  // UserError on text of another form

struct Type {
  DType dtype = DType::kUndefined;  // kUndefined: known at run time only
  std::optional<Shape> shape;       // nothing: known at run time only
  // Strides in elements that the tensor has when it leaves a kernel. Nothing: row-major.
  std::optional<Shape> strides;
  Device device;

  bool is_known() const { return dtype != DType::kUndefined && shape.has_value(); }
  bool operator==(const Type&) const = default;
};

std::string to_string(const Type& type);  // "float32[N,128]"

}  // namespace torch_ort::ir
