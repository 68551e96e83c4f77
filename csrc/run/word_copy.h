// Copies between tensors of any strides on GPUs, 16 bytes at once; internal to run/.
//
// PyTorch's kernel for such copies moves one element in each access, which for bfloat16 is half of
// what the memory of an H100 can do, or less: 17 us for 12.6 MB into rows of a wider matrix, where
// 8 are enough.
#pragma once

#include "run/spec.h"

namespace torch_ort::run {

// Whether tensors of this layout can be copied in words of 16 bytes: there is a dim along which
// both are contiguous, and all that is not along it is a multiple of a word.
bool has_word_copy(const TensorSpec& spec, const std::vector<int64_t>& strides_of_copy);

// As `to.copy_(from)`, for tensors of the same sizes, dtype and device. In words if they allow it.
void copy_in_words(const at::Tensor& to, const at::Tensor& from);

}  // namespace torch_ort::run
