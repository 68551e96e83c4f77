// Scratch memory that a thread keeps for its next program; internal to cpu/.
#pragma once

#include <cstdint>
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
  kProduct
};

// A buffer of at least `size` elements, aligned to a cache line. It is not cleared. A later call
// for the same T and Use may move it.
template <typename T, Use kUse>
T* thread_memory(int64_t size) {
  static thread_local std::vector<T> memory;
  constexpr size_t kLine = 64 / sizeof(T);
  const size_t wanted = static_cast<size_t>(size) + kLine;
  if (memory.size() < wanted) memory.resize(wanted);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

}  // namespace torch_ort::cpu
