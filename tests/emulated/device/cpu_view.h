// Tensors of the device as tensors of the CPU over the same memory, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace emulated {

// One call of a kernel: what went in as CPU tensors, so that results which share memory with
// arguments, or are arguments, come back as such.
class CpuView {
 public:
  CpuView();

  // Tensors that are not of the device stay as they are.
  at::Tensor to_cpu(const at::Tensor& tensor);

  // Memory that is new is copied to the device.
  at::Tensor to_device(const at::Tensor& tensor);

  // Gives arguments the sizes and the memory that a kernel has given their views (resize_, out=).
  void carry_back();

 private:
  struct Alias {
    c10::Storage cpu, device;
  };
  struct Argument {
    at::Tensor cpu, device;
  };
  std::unordered_map<c10::StorageImpl*, Alias> by_device_storage_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> by_cpu_storage_;  // a tensor in that memory
  std::unordered_map<c10::TensorImpl*, Argument> arguments_;  // by the impl of the CPU's tensor
};

}  // namespace emulated
