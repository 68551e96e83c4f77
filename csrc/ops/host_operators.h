// Operators that a GPU cannot run without the host: their kernels read a number back, or wait.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace torch_ort::ops {

// Why; empty if the GPU alone runs it. Of operators that PyTorch does not define nothing is known.
std::string why_host_is_needed(const c10::OperatorHandle& op);

}  // namespace torch_ort::ops
