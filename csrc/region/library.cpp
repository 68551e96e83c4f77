#include "region/library.h"

#include "base/error.h"

namespace torch_ort::region {

namespace {

const Library* registered = nullptr;

const void* moved(const DeviceMatrix& matrix, int64_t elements) {
  return static_cast<const char*>(matrix.data) + elements * ir::size_bytes(matrix.dtype);
}

}  // namespace

DeviceMatrix DeviceMatrix::rows_from(int64_t first, int64_t count) const {
  return {moved(*this, first * row_stride), dtype, count, columns, row_stride, column_stride};
}

DeviceMatrix DeviceMatrix::columns_from(int64_t first, int64_t count) const {
  return turned().rows_from(first, count).turned();
}

void set_library(const Library* library) { registered = library; }

const Library& library() {
  ORT_CHECK(registered != nullptr, "region: no library for products of devices is registered");
  return *registered;
}

}  // namespace torch_ort::region
