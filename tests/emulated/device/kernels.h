// Kernels of the test device.
#pragma once

#include "cpu_view.h"
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

namespace emulated {

// Operators that a GPU has and the CPU has not, or that take more there.
void register_gpu_kernels(torch::Library& library);
// Flash and memory-efficient attention, and the choice between them.
void register_attention(torch::Library& library);

// Runs a function of CPU tensors on tensors of the device, and gives the tensor that it returns.
template <typename Function, typename... Tensors>
at::Tensor on_cpu(Function function, const Tensors&... tensors) {
  CpuView view;
  return view.to_device(function(view.to_cpu(tensors)...));
}

// "aten::mm 12\n...": how often each operator ran, by its full name.
std::string calls_by_operator();

}  // namespace emulated
