// What the kernels of a step take: dense tensors that are read and written as they lie in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_ort::optim {

using Tensors = std::vector<at::Tensor>;

// Whether a tensor is dense on this kind of device, and its elements lie as they are.
bool is_dense(const at::Tensor& tensor, c10::DeviceType device);

// Whether the elements of all can be taken one after the other as they lie in memory, all of
// float64 or each of float32, bfloat16 or float16.
bool have_one_layout(const Tensors& operands, c10::DeviceType device);
bool have_dtypes(const Tensors& operands);  // such ones

// Whether it holds one number, of float32 or float64.
bool is_count(const at::Tensor& tensor, c10::DeviceType device);
// The number of a count on the CPU.
double count_of(const at::Tensor& steps);
// Adds a step to it.
double count_step(const at::Tensor& steps);

// Tells autograd that a tensor was written.
void note_edit(const at::Tensor& tensor);

// UserError if there are not as many `what` as there should be.
void check_length(const char* what, size_t got, size_t want);

}  // namespace torch_ort::optim
