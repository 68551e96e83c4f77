// What PyTorch knows of a device, without its headers: the stream in force, and memory.
#pragma once

#include <cstdint>
#include <memory>

namespace torch_ort::cuda {

// The CUstream on which the calling thread works on a device, whichever device is current.
void* current_stream(int device);

// Memory of PyTorch's caching allocator, for kernels of the stream in force: what is queued on it
// before this is destroyed may use it. Raises c10::OutOfMemoryError.
class Scratch {
 public:
  Scratch(int64_t num_bytes, int device);
  ~Scratch();
  Scratch(Scratch&&) noexcept;
  Scratch& operator=(Scratch&&) noexcept;

  void* data() const;  // nullptr of 0 bytes

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace torch_ort::cuda
