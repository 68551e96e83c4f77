// Errors that kernels of a device find in their operands: class labels, ids and places out of
// bounds. A kernel cannot throw, and the host does not wait for it. So the kernel writes a number
// into a word that the host can read, and the next call of a kernel throws.
#pragma once

#include "cuda/driver.h"

#include <cstdint>

namespace torch_ort::cuda {

// What the word holds. Prelude.cuh has the first two as well.
enum class Fault : uint32_t { kBadLabel = 1, kBadId = 2, kBadPlace = 3 };

class Faults {
 public:
  explicit Faults(int device) : word_(device) {}
  void* word() const { return word_.device(); }
  // Throws IndexError if kernels have found an error since the last call.
  void check();

 private:
  HostWord word_;
};

// The word of kernels that run on the host.
class HostFaults {
 public:
  void* word() { return &word_; }
  void check() const;  // throws IndexError if a kernel has found an error

 private:
  uint32_t word_ = 0;
};

// The faults of a device; they live as long as the process. Throws what Driver::get() throws. Takes
// no lock, but in the first call: every kernel asks.
Faults& faults(int device);

}  // namespace torch_ort::cuda
