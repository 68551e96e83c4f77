// Conversions between the IR's types and PyTorch's.
#pragma once

#include "ir/type.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace torch_ort::run {

c10::ScalarType scalar_type(ir::DType dtype);  // Unsupported if PyTorch has no such type
ir::DType dtype(c10::ScalarType type);         // Unsupported if ONNX has no such type
c10::Device torch_device(const ir::Device& device);

}  // namespace torch_ort::run
