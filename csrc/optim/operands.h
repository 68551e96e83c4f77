// Checks of the tensors that optimizer kernels take: dense tensors, which are read and written in
// the order of their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ort::optim {

using Tensors = std::vector<at::Tensor>;

// Whether a tensor is on this kind of device, strided and dense, is no subclass, and has no
// negative bit.
bool is_dense(const at::Tensor& tensor, c10::DeviceType device);

// Whether all tensors are dense on this kind of device, have the same sizes and strides, and
// have_dtypes().
bool have_one_layout(const Tensors& operands, c10::DeviceType device);
// Whether they are all float64, or each of them float32, bfloat16 or float16.
bool have_dtypes(const Tensors& operands);

// Whether it holds one number of float32 or float64.
bool is_count(const at::Tensor& tensor, c10::DeviceType device);
// Returns the number of a count on the CPU.
double count_of(const at::Tensor& steps);
// Adds 1 to it and returns the sum.
double count_step(const at::Tensor& steps);

// Increments the version counter of a tensor that was written.
void note_edit(const at::Tensor& tensor);

// Throws UserError unless `got` equals `want`. The message names `what`.
void check_length(const char* what, size_t got, size_t want);

}  // namespace torch_ort::optim
