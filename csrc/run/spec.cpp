#include "run/spec.h"

#include "base/error.h"
#include "run/dtype.h"

#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

int64_t span_bytes(const TensorSpec& spec) {
  int64_t last = 0;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (spec.sizes[i] == 0) return 0;
    last += (spec.sizes[i] - 1) * spec.strides[i];
  }
  return (last + 1) * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

}  // namespace

TensorSpec spec_of(const at::Tensor& tensor) {
  TensorSpec spec;
  spec.known = tensor.defined();
  if (!spec.known) return spec;
  spec.sizes = tensor.sizes().vec();
  spec.strides = tensor.strides().vec();
  spec.dtype = tensor.scalar_type();
  spec.device = tensor.device();
  spec.bytes = span_bytes(spec);
  return spec;
}

bool is_row_major(const TensorSpec& spec) {
  int64_t stride = 1;
  for (size_t i = spec.sizes.size(); i-- > 0;) {
    if (spec.sizes[i] != 1 && spec.strides[i] != stride) return false;
    stride *= spec.sizes[i];
  }
  return true;
}

TensorSpec spec_of(const ir::Type& type, const ir::SymbolLookup& lookup) {
  TensorSpec spec;
  spec.known = true;
  spec.sizes = eval_dims(*type.shape, lookup);
  spec.strides = type.strides ? eval_dims(*type.strides, lookup) : std::vector<int64_t>();
  if (!type.strides) {
    spec.strides.assign(spec.sizes.size(), 1);
    for (size_t i = spec.sizes.size(); i-- > 1;) {
      spec.strides[i - 1] = spec.strides[i] * std::max<int64_t>(spec.sizes[i], 1);
    }
  }
  spec.dtype = scalar_type(type.dtype);
  spec.device = torch_device(type.device);
  spec.bytes = span_bytes(spec);
  return spec;
}

bool equals(const TensorSpec& spec, const at::Tensor& tensor) {
  if (!tensor.defined() || !spec.known) return tensor.defined() == spec.known;
  return tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
         tensor.strides() == c10::IntArrayRef(spec.strides) && tensor.scalar_type() == spec.dtype &&
         tensor.device() == spec.device;
}

at::Tensor tensor_over(c10::Storage storage, const TensorSpec& spec, int64_t byte_offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(spec.dtype, std::nullopt, spec.device)),
      c10::scalarTypeToTypeMeta(spec.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      spec.sizes, spec.strides, byte_offset / static_cast<int64_t>(c10::elementSize(spec.dtype)));
  return tensor;
}

c10::Storage storage_without_memory(int64_t bytes, c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), nullptr, false));
}

std::vector<int64_t> eval_dims(const ir::Shape& dims, const ir::SymbolLookup& lookup) {
  std::vector<int64_t> values;
  values.reserve(dims.size());
  for (const ir::Dim& dim : dims) {
    std::optional<int64_t> value = dim.is_constant() ? dim.constant() : dim.evaluate(lookup);
    ORT_CHECK(value.has_value(), "run: symbol in '", dim.str(), "' is not bound");
    values.push_back(*value);
  }
  return values;
}

at::Tensor make_tensor(const TensorSpec& spec) {
  c10::Allocator* allocator = c10::GetAllocator(spec.device.type());
  c10::Storage storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), spec.bytes,
                                            allocator->allocate(spec.bytes), allocator, true));
  return tensor_over(std::move(storage), spec, 0);
}

}  // namespace torch_ort::run
