// Copies results that share memory with other tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ort::run {

// Returns the tensor, or a copy if it shares memory with one of `others`. Undefined tensors share
// memory with none.
at::Tensor owned(const at::Tensor& tensor, const std::vector<at::Tensor>& others);

}  // namespace torch_ort::run
