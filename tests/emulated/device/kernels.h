// Kernels of the test device.
#pragma once

#include "cpu_view.h"
#include "graphs.h"
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

namespace emulated {

// Operators that a GPU has and the CPU has not, or that take more there.
void register_gpu_kernels(torch::Library& library);
// Flash and memory-efficient attention, and the choice between them.
void register_attention(torch::Library& library);

// Runs a function of CPU tensors on tensors of the device, and gives the tensor that it returns,
// which is new. The function is kept if a graph is captured.
template <typename Function, typename... Tensors>
at::Tensor on_cpu(Function function, const Tensors&... tensors) {
  const auto run = [function](const auto&... each) {
    CpuView view;
    return view.to_device(function(view.to_cpu(each)...));
  };
  const at::Tensor result = run(tensors...);
  if (is_recording()) {
    Unowned unowned;
    record([run, to = Unowned().of(result), ... each = unowned.of(tensors)] {
      copy_bytes(run(each...), to);
    });
  }
  return result;
}

// "aten::mm 12\n...": how often each operator ran, by its full name.
std::string calls_by_operator();

}  // namespace emulated
