#include "run/spec.h"

#include "base/error.h"
#include "run/dtype.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <limits>

namespace torch_ort::run {

namespace {

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& sizes, bool& fits) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    const int64_t size = std::max<int64_t>(sizes[i], 1);
    fits = fits && !__builtin_mul_overflow(strides[i], size, &strides[i - 1]);
  }
  return strides;
}

// Strides and sizes of the dims of size above 1, the smallest stride first.
std::vector<std::pair<int64_t, int64_t>> dims_by_stride(const TensorSpec& spec) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (spec.sizes[i] > 1) dims.emplace_back(spec.strides[i], spec.sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

// Whether the bytes of the elements, and of the memory that they span, fit into 64 bits. Elements
// have up to 16 bytes, and plans round up.
bool fits_in_memory(const TensorSpec& spec) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 64;
  int64_t count = 1, last = 0, step;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    const bool overflows =
        __builtin_mul_overflow(count, std::max<int64_t>(spec.sizes[i], 1), &count) ||
        __builtin_mul_overflow(std::max<int64_t>(spec.sizes[i] - 1, 0), spec.strides[i], &step) ||
        __builtin_add_overflow(last, step, &last);
    if (overflows) return false;
  }
  return count <= kMost && last < kMost;
}

// The dims of size above 1 of a tensor that fills its memory, from the outermost to the innermost.
// Nothing if it leaves gaps.
std::optional<std::vector<size_t>> filled_dims(const TensorSpec& spec) {
  std::vector<size_t> dims;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (spec.sizes[i] != 1) dims.push_back(i);
  }
  std::sort(dims.begin(), dims.end(),
            [&spec](size_t a, size_t b) { return spec.strides[a] > spec.strides[b]; });
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (spec.strides[dims[i]] != stride) return std::nullopt;
    stride *= spec.sizes[dims[i]];
  }
  return dims;
}

std::vector<int64_t> at_dims(const std::vector<int64_t>& numbers, const std::vector<size_t>& dims) {
  std::vector<int64_t> picked;
  for (size_t dim : dims) picked.push_back(numbers[dim]);
  return picked;
}

bool has_negative(const std::vector<int64_t>& values) {
  return std::any_of(values.begin(), values.end(), [](int64_t value) { return value < 0; });
}

std::string text(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return concat(c10::toString(dtype), sizes, " with strides ", strides);
}

std::string text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  return text(tensor.scalar_type(), tensor.sizes(), tensor.strides());
}

[[noreturn]] void raise_unlike(const ir::Value& value, const TensorSpec& spec,
                               const at::Tensor& tensor) {
  throw UserError(concat("run: value '", value.name, "': got ", text(tensor), ", want ",
                         text(spec.dtype, spec.sizes, spec.strides), " as its type says"));
}

}  // namespace

int64_t span_bytes(const TensorSpec& spec) {
  int64_t last = 0;
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (spec.sizes[i] == 0) return 0;
    last += (spec.sizes[i] - 1) * spec.strides[i];
  }
  return (last + 1) * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

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

bool is_dense(const TensorSpec& spec) {
  if (std::find(spec.sizes.begin(), spec.sizes.end(), 0) != spec.sizes.end()) return true;
  int64_t filled = 1;
  for (const auto& [stride, size] : dims_by_stride(spec)) {
    if (stride != filled) return false;
    filled *= size;
  }
  return true;
}

bool may_overlap(const TensorSpec& spec) {
  int64_t last = 0;
  for (const auto& [stride, size] : dims_by_stride(spec)) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

bool is_row_major(const TensorSpec& spec) {
  int64_t stride = 1;
  for (size_t i = spec.sizes.size(); i-- > 0;) {
    if (spec.sizes[i] != 1 && spec.strides[i] != stride) return false;
    stride *= spec.sizes[i];
  }
  return true;
}

bool same_strides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

TensorSpec spec_of(const ir::Value& value, const ir::SymbolLookup& lookup) {
  const ir::Type& type = value.type;
  TensorSpec spec;
  spec.known = true;
  bool fits = true;
  spec.sizes = eval_dims(*type.shape, lookup);
  spec.strides =
      type.strides ? eval_dims(*type.strides, lookup) : row_major_strides(spec.sizes, fits);
  spec.dtype = scalar_type(type.dtype);
  spec.device = torch_device(type.device);
  const bool is_possible = spec.strides.size() == spec.sizes.size() && !has_negative(spec.sizes) &&
                           !has_negative(spec.strides) && fits && fits_in_memory(spec);
  if (!is_possible) {
    throw UserError(
        concat("run: value '", value.name, "': got ", text(spec.dtype, spec.sizes, spec.strides),
               ", want sizes and strides from 0 up, of equal number, ", "that fit in memory"));
  }
  spec.bytes = span_bytes(spec);
  return spec;
}

std::optional<std::vector<int64_t>> strides_like(const TensorSpec& one,
                                                 const std::vector<int64_t>& strides,
                                                 const TensorSpec& other) {
  const auto from = filled_dims(one), to = filled_dims(other);
  if (!from || !to || one.bytes != other.bytes || one.dtype != other.dtype) return std::nullopt;
  const auto found = at::detail::computeStride(c10::IntArrayRef(at_dims(one.sizes, *from)),
                                               c10::IntArrayRef(at_dims(strides, *from)),
                                               c10::IntArrayRef(at_dims(other.sizes, *to)));
  if (!found) return std::nullopt;
  std::vector<int64_t> result(other.sizes.size(), 1);
  for (size_t i = 0; i < to->size(); ++i) result[(*to)[i]] = (*found)[i];
  return result;
}

bool has_layout(const at::Tensor& tensor, const TensorSpec& spec) {
  return tensor.sizes() == c10::IntArrayRef(spec.sizes) && tensor.scalar_type() == spec.dtype &&
         same_strides(spec.sizes, tensor.strides(), spec.strides);
}

void check_sizes(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.sizes() != c10::IntArrayRef(spec.sizes))
    raise_unlike(value, spec, tensor);
}

void check_learnt(const std::string& what, const TensorSpec& spec, const at::Tensor& tensor) {
  const auto form = [](c10::ScalarType dtype, c10::IntArrayRef sizes, c10::Device device) {
    return concat(c10::toString(dtype), sizes, " on ", device);
  };
  if (tensor.defined() && tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
      tensor.scalar_type() == spec.dtype && tensor.device().type() == spec.device.type()) {
    return;
  }
  const std::string got =
      tensor.defined() ? form(tensor.scalar_type(), tensor.sizes(), tensor.device()) : "None";
  throw UserError(concat(what, ": got ", got, ", want ", form(spec.dtype, spec.sizes, spec.device),
                         " as when the graph was captured; if the form of a result depends on more "
                         "than the forms of the arguments, leave the Function out of the graph"));
}

void check_layout(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor) {
  if (!tensor.defined() || !has_layout(tensor, spec)) raise_unlike(value, spec, tensor);
}

at::Tensor as_promised(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor) {
  check_sizes(value, spec, tensor);
  at::Tensor copy = at::empty_strided(spec.sizes, spec.strides, tensor.options().dtype(spec.dtype));
  return copy.copy_(tensor);
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

at::Tensor computed(const at::Tensor& tensor) {
  // Without the dims along which one element is repeated.
  at::Tensor once = tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) once = once.narrow(dim, 0, 1);
  }
  at::Tensor copy = make_tensor(spec_of(once));
  if (tensor._is_zerotensor()) {
    copy.zero_();
  } else {
    copy.copy_(once);
  }
  return copy.expand(tensor.sizes());
}

std::optional<std::vector<at::Tensor>> computed(const std::vector<at::Tensor>& tensors) {
  if (std::none_of(tensors.begin(), tensors.end(), is_computed_by_reader)) return std::nullopt;
  std::vector<at::Tensor> numbers = tensors;
  for (at::Tensor& tensor : numbers) {
    if (is_computed_by_reader(tensor)) tensor = computed(tensor);
  }
  return numbers;
}

at::Tensor make_tensor(const TensorSpec& spec) {
  c10::Allocator* allocator = c10::GetAllocator(spec.device.type());
  c10::Storage storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), spec.bytes,
                                            allocator->allocate(spec.bytes), allocator, true));
  return tensor_over(std::move(storage), spec, 0);
}

}  // namespace torch_ort::run
