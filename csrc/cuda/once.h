// A value that the first caller computes while others wait.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

namespace torch_ort::cuda {

template <typename T>
class Once {
 public:
  // If `make` throws, its caller gets the exception, and the next caller tries again.
  template <typename Make>
  T& get(const Make& make) {
    if (!is_made_.load(std::memory_order_acquire)) [[unlikely]] {
      const std::lock_guard lock(mutex_);
      if (!value_) {
        value_.emplace(make());
        is_made_.store(true, std::memory_order_release);
      }
    }
    return *value_;
  }
  bool is_made() const { return is_made_.load(std::memory_order_acquire); }
  T* found() { return is_made() ? &*value_ : nullptr; }  // nullptr if it is not computed yet

 private:
  std::atomic<bool> is_made_{false};
  std::mutex mutex_;
  std::optional<T> value_;
};

}  // namespace torch_ort::cuda
