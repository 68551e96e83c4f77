// Scratch memory that a thread keeps for its next program; internal to cpu/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::cpu {

// Buffers that may be in use at the same time.
enum class Use {
  kRegisters,
  kParts,
  kSums,
  kHead,
  kLeft,
  kRight,
  kLeftRows,
  kRightRows,
  kConverted,
  kPanel,
  kProduct,
  kWeight,  // of a recurrent layer or a convolution, packed
  kImageRow,
  kGradientRow,
  kStates
};

// A buffer of at least `size` elements, aligned to a cache line. It is not cleared. A later call
// for the same T and Use may move it.
template <typename T, Use kUse>
T* thread_memory(int64_t size) {
  static thread_local std::vector<T> memory;
  constexpr size_t kLine = 64 / sizeof(T);
  const size_t wanted = static_cast<size_t>(size) + kLine;
  if (memory.size() < wanted) memory.resize(wanted);
  auto* begin = static_cast<void*>(memory.data());
  size_t num_bytes = memory.size() * sizeof(T);
  return static_cast<T*>(std::align(64, static_cast<size_t>(size) * sizeof(T), begin, num_bytes));
}

}  // namespace torch_ort::cpu
