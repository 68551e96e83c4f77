#include "run/word_copy.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torch_ort::run {

namespace {

// The dtype of a word. Copies of complex numbers move all bits.
constexpr c10::ScalarType kWord = c10::kComplexDouble;
constexpr int64_t kWordBytes = 16;

// Whether all strides but that of `dim` are multiples of a word; those of dims of size 1 do not
// matter.
bool steps_by_words(c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t dim, int64_t unit) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i != dim && sizes[i] != 1 && strides[i] % unit != 0) return false;
  }
  return strides[dim] == 1 && sizes[dim] % unit == 0;
}

// The dim along which words are taken; nothing if there is none.
std::optional<size_t> dim_of_words(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b,
                                   int64_t element_bytes) {
  if (element_bytes >= kWordBytes) return std::nullopt;
  const int64_t unit = kWordBytes / element_bytes;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 0 && steps_by_words(sizes, a, dim, unit) &&
        steps_by_words(sizes, b, dim, unit)) {
      return dim;
    }
  }
  return std::nullopt;
}

// Whether the tensor and its storage, from which offsets count in words, begin with one.
bool begins_with_word(const at::Tensor& tensor) {
  const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kWordBytes == 0 &&
         begin % kWordBytes == 0;
}

at::Tensor in_words(const at::Tensor& tensor, size_t dim) {
  const int64_t unit = kWordBytes / static_cast<int64_t>(tensor.element_size());
  TensorSpec spec = spec_of(tensor);
  const int64_t begin = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (i != dim) spec.strides[i] /= unit;
  }
  spec.sizes[dim] /= unit;
  spec.dtype = kWord;
  return tensor_over(tensor.storage(), spec, begin);
}

}  // namespace

bool has_word_copy(const TensorSpec& spec, const std::vector<int64_t>& strides_of_copy) {
  return dim_of_words(spec.sizes, spec.strides, strides_of_copy,
                      static_cast<int64_t>(c10::elementSize(spec.dtype)))
      .has_value();
}

void copy_in_words(const at::Tensor& to, const at::Tensor& from) {
  const std::optional<size_t> dim = dim_of_words(to.sizes(), to.strides(), from.strides(),
                                                 static_cast<int64_t>(to.element_size()));
  if (!dim || is_computed_by_reader(from) || !begins_with_word(to) || !begins_with_word(from)) {
    to.copy_(from);
    return;
  }
  in_words(to, *dim).copy_(in_words(from, *dim));
}

}  // namespace torch_ort::run
