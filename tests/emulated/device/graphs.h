// CUDA graphs as PyTorch captures them, over the graphs of the emulated driver.
//
// A real device does nothing while a stream is captured. Here the work is done as well, since
// kernels of the CPU need operands with values, and then undone: memory that is not the graph's
// holds what it held before, and the graph's own memory is poisoned. A replay poisons that memory
// first, repeats the kernels at the addresses of the capture, whoever has them by then, and draws
// random numbers from where the generator is.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

namespace emulated {

// Whether this thread captures its current stream.
bool is_recording();
// Adds to the graph what has been done.
void record(std::function<void()> work);
// Raises PyTorch's error, and makes the capture unusable, if the operator needs the host.
void check_capture(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

// Tensors over the same memory that do not keep it, as addresses in a graph do not.
class Unowned {
 public:
  at::Tensor of(const at::Tensor& tensor);
  // Whether the memory of a tensor has been seen.
  bool has(const at::Tensor& tensor) const;

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// Copies the bytes of a tensor of the device to another one of the same form.
void copy_bytes(const at::Tensor& from, const at::Tensor& to);

}  // namespace emulated
