// Products by the library of a device, such as cuBLAS, for kernels that are several launches with
// products in between (KernelRow::uses_library). PyTorch calls these libraries, and only run/ knows
// PyTorch's operators, so that run/ registers them here.
#pragma once

#include "ir/type.h"

#include <cstdint>

namespace torch_ort::region {

// A matrix in the memory of a device. Strides are in elements.
struct DeviceMatrix {
  const void* data = nullptr;
  ir::DType dtype = ir::DType::kUndefined;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 1;

  DeviceMatrix turned() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
  DeviceMatrix rows_from(int64_t first, int64_t count) const;
  DeviceMatrix columns_from(int64_t first, int64_t count) const;
};

// result <- factor * a * b, to which is added what `added` says. The factors have one dtype, and
// the result has it too, or is float32 for factors of short floats.
struct LibraryProduct {
  DeviceMatrix result, a, b;
  // kVector: one number for each column, which has the dtype of the factors.
  enum class Added : uint8_t { kNothing, kResult, kVector } added = Added::kNothing;
  const void* vector = nullptr;
  int64_t vector_stride = 1;
  double factor = 1;
};

class Library {
 public:
  virtual ~Library() = default;
  // Queues a product on PyTorch's current stream of the device.
  virtual void multiply(const LibraryProduct& product, int device) const = 0;
};

// Registers the libraries of all devices. Called when the module is loaded.
void set_library(const Library* library);
// Throws InternalError if none is registered.
const Library& library();

}  // namespace torch_ort::region
