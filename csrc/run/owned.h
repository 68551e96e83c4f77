// Results that may lie in memory which is not theirs.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ort::run {

// The tensor; a copy where it lies in memory of one of `others`. Undefined ones lie nowhere.
at::Tensor owned(const at::Tensor& tensor, const std::vector<at::Tensor>& others);

}  // namespace torch_ort::run
