// A table of values by integer keys, for places that can hold data but no pointers; internal to
// run/.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace torch_ort::run {

// A caller that has found a value keeps it alive even if the key is removed. Values are destroyed
// outside of the lock, since that may run Python code.
template <typename T>
class KeyTable {
 public:
  using Pointer = std::shared_ptr<const T>;

  // Adds a value and returns its key, which is never 0.
  int64_t add(T value) {
    auto added = std::make_shared<const T>(std::move(value));
    std::lock_guard lock(mutex_);
    const int64_t key = next_key_++;
    values_[key] = std::move(added);
    return key;
  }

  // Replaces a value by a changed copy. False if there is none.
  template <typename Change>
  bool change(int64_t key, Change&& change) {
    Pointer old;
    std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end()) return false;
    auto changed = std::make_shared<T>(*found->second);
    change(*changed);
    old = std::exchange(found->second, std::move(changed));
    return true;
  }

  // nullptr if there is none.
  Pointer find(int64_t key) const {
    std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second;
  }

  void remove(int64_t key) {
    Pointer removed;
    std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end()) return;
    removed = std::move(found->second);
    values_.erase(found);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, Pointer> values_;
  int64_t next_key_ = 1;
};

}  // namespace torch_ort::run
