#include "run/dtype.h"

#include "base/error.h"

#include <utility>

namespace torch_ort::run {

namespace {

constexpr std::pair<ir::DType, c10::ScalarType> kTypes[] = {
    {ir::DType::kFloat, c10::kFloat},
    {ir::DType::kUInt8, c10::kByte},
    {ir::DType::kInt8, c10::kChar},
    {ir::DType::kUInt16, c10::ScalarType::UInt16},
    {ir::DType::kInt16, c10::kShort},
    {ir::DType::kInt32, c10::kInt},
    {ir::DType::kInt64, c10::kLong},
    {ir::DType::kBool, c10::kBool},
    {ir::DType::kHalf, c10::kHalf},
    {ir::DType::kDouble, c10::kDouble},
    {ir::DType::kUInt32, c10::ScalarType::UInt32},
    {ir::DType::kUInt64, c10::ScalarType::UInt64},
    {ir::DType::kComplex64, c10::kComplexFloat},
    {ir::DType::kComplex128, c10::kComplexDouble},
    {ir::DType::kBFloat16, c10::kBFloat16},
    {ir::DType::kFloat8E4M3FN, c10::ScalarType::Float8_e4m3fn},
    {ir::DType::kFloat8E4M3FNUZ, c10::ScalarType::Float8_e4m3fnuz},
    {ir::DType::kFloat8E5M2, c10::ScalarType::Float8_e5m2},
    {ir::DType::kFloat8E5M2FNUZ, c10::ScalarType::Float8_e5m2fnuz},
};

}  // namespace

c10::ScalarType scalar_type(ir::DType dtype) {
  for (auto [ours, torchs] : kTypes) {
    if (ours == dtype) return torchs;
  }
  throw Unsupported(concat("dtype: got ", ir::name(dtype), ", which PyTorch does not have"));
}

ir::DType dtype(c10::ScalarType type) {
  for (auto [ours, torchs] : kTypes) {
    if (torchs == type) return ours;
  }
  throw Unsupported(concat("dtype: got ", c10::toString(type), ", which ONNX does not have"));
}

c10::Device torch_device(const ir::Device& device) {
  return c10::Device(device.index < 0 ? device.kind : concat(device.kind, ":", device.index));
}

}  // namespace torch_ort::run
