// Arguments of kernels of PyTorch that read or write memory without a look at what they are given.
// Graphs that autograd makes give them what they want; those of files need not.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_ort::run {

// Raises UserError if a call of `op` with the arguments on the stack would leave its memory.
void check_kernel_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

}  // namespace torch_ort::run
