// The memory that the engine keeps between runs. Buffers are allocated and given back, so the
// system is asked for nothing as long as sizes repeat. On the CPU a buffer is an aligned mapping
// for which huge pages are advised. On other devices it comes from PyTorch's caching allocator, on
// the current stream.
//
// One pool serves the whole process, so that different sizes and several models share buffers.
// Under the address sanitizer memory is poisoned while it is not allocated, and behind the
// allocated bytes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace torch_ort::run {

// An allocated buffer. It returns to the pool when it is destroyed.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() { give_back(); }

  void* data() const { return data_; }
  int64_t capacity() const { return capacity_; }
  c10::Device device() const { return device_; }
  void give_back() noexcept;
  void free() noexcept;  // returns it to the system, not to the pool

  // As release_pages() below, for a part of the buffer. Does nothing on other devices than the CPU.
  void release_pages(int64_t begin, int64_t end) noexcept;

 private:
  friend Buffer allocate(c10::Device device, int64_t bytes);
  void forget() noexcept;
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    std::swap(device_, other.device_);
    std::swap(owner_, other.owner_);
  }

  void* data_ = nullptr;
  int64_t capacity_ = 0;
  c10::Device device_{c10::kCPU};
  c10::DataPtr owner_;  // of memory from PyTorch's allocator
};

// Returns a buffer of at least `bytes`. Throws c10::OutOfMemoryError if there is no memory; on the
// CPU it frees the idle buffers first and tries once more.
Buffer allocate(c10::Device device, int64_t bytes);

// Returns the whole pages of a part of CPU memory to the system until they are used again. Their
// contents are lost.
void release_pages(void* data, int64_t bytes) noexcept;

// Frees the idle buffers and returns the number of bytes.
int64_t free_idle_buffers();

}  // namespace torch_ort::run
