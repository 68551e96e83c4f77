// Memory that the engine holds between runs. Buffers are lent and come back; nothing goes to the
// system while the sizes repeat. On CPU a buffer is an aligned mapping for which huge pages are
// advised; on other devices it comes from PyTorch's caching allocator, on the current stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace torch_ort::run {

// A lent buffer; gives itself back when destroyed.
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
  void free() noexcept;  // to the system, not to the pool

  // See below. Does nothing on other devices than the CPU.
  void release_pages(int64_t begin, int64_t end) noexcept;

 private:
  friend Buffer lend(c10::Device device, int64_t bytes);
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
  c10::DataPtr owner_;  // of memory that an allocator of PyTorch gave
};

// A buffer of at least `bytes`. Raises c10::OutOfMemoryError, or std::bad_alloc's message as
// PyTorch words it, after idle buffers have been freed once.
Buffer lend(c10::Device device, int64_t bytes);

// Lets the system have the whole pages of CPU memory until they are used again; what they held is
// lost.
void release_pages(void* data, int64_t bytes) noexcept;

// Frees the idle buffers; gives the bytes that went back to the system.
int64_t free_idle_buffers();

}  // namespace torch_ort::run
