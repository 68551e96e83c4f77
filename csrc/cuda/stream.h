// PyTorch's state of a device, without its headers: the current stream, and memory.
#pragma once

#include <cstdint>
#include <memory>

namespace torch_ort::cuda {

// The CUstream of the calling thread for a device, even if another device is current.
void* current_stream(int device);

// Memory from PyTorch's caching allocator for kernels of the current stream. Kernels that are
// queued before this is destroyed may use it. Throws c10::OutOfMemoryError.
class Scratch {
 public:
  Scratch(int64_t num_bytes, int device);
  ~Scratch();
  Scratch(Scratch&&) noexcept;
  Scratch& operator=(Scratch&&) noexcept;

  void* data() const;  // nullptr for 0 bytes

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace torch_ort::cuda
