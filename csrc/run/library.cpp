#include "run/library.h"

#include "base/error.h"
#include "run/dtype.h"
#include "run/spec.h"

#include <ATen/ops/addmm.h>

namespace torch_ort::run {

namespace {

using Added = region::LibraryProduct::Added;

at::Tensor tensor_of(const void* data, ir::DType dtype, c10::Device device,
                     std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  TensorSpec spec;
  spec.known = true;
  spec.sizes = std::move(sizes);
  spec.strides = std::move(strides);
  spec.dtype = scalar_type(dtype);
  spec.device = device;
  spec.bytes = span_bytes(spec);
  c10::Storage storage = storage_without_memory(spec.bytes, device);
  storage.set_data_ptr_noswap(c10::DataPtr(const_cast<void*>(data), device));
  return tensor_over(std::move(storage), spec, 0);
}

at::Tensor tensor_of(const region::DeviceMatrix& matrix, c10::Device device) {
  return tensor_of(matrix.data, matrix.dtype, device, {matrix.rows, matrix.columns},
                   {matrix.row_stride, matrix.column_stride});
}

class TorchLibrary final : public region::Library {
 public:
  void multiply(const region::LibraryProduct& product, int device) const override {
    const c10::Device on(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    at::Tensor result = tensor_of(product.result, on);
    const at::Tensor a = tensor_of(product.a, on), b = tensor_of(product.b, on);
    ORT_CHECK(product.added != Added::kVector || product.result.dtype == product.a.dtype,
              "library: want a vector of the dtype of the result");
    // Without a part that is added, beta is 0: then the result is only written.
    const at::Tensor start = product.added == Added::kVector
                                 ? tensor_of(product.vector, product.a.dtype, on,
                                             {product.result.columns}, {product.vector_stride})
                                 : result;
    const double beta = product.added == Added::kNothing ? 0 : 1;
    if (product.result.dtype == product.a.dtype) {
      at::addmm_out(result, start, a, b, beta, product.factor);
    } else {
      // From 2.11 on, PyTorch adds to a start that has the dtype of the result.
      at::addmm_out(result, start, a, b, scalar_type(product.result.dtype), beta, product.factor);
    }
  }
};

}  // namespace

const region::Library& torch_library() {
  static const TorchLibrary one;
  return one;
}

}  // namespace torch_ort::run
