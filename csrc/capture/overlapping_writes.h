// Finds operators that write into tensors several elements of which are one number in memory, such
// as expanded ones. PyTorch's functionalization, which makes new tensors of writes, adds what each
// of these elements changes by; in eager PyTorch such an operator raises, or the last one stays.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace torch_ort::capture {

// While it lives, and no later one of the same thread does, calls `report` with the name of each
// operator of this thread that does so, such as "aten::fill_". Tensors of which the sizes are
// symbols are found by their strides of 0.
class OverlappingWrites {
 public:
  using Report = std::function<void(const std::string& name)>;

  explicit OverlappingWrites(Report report);
  ~OverlappingWrites();
  OverlappingWrites(const OverlappingWrites&) = delete;
  OverlappingWrites& operator=(const OverlappingWrites&) = delete;

 private:
  friend struct OverlapObserver;

  Report report_;
  OverlappingWrites* outer_;
  uint64_t callback_ = 0;  // 0: that of an outer one is used
};

}  // namespace torch_ort::capture
