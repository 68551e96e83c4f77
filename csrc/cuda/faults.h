// What kernels of a device have found wrong with their operands: class labels and ids out of
// bounds. A kernel cannot raise, and nobody waits for it: it leaves a number in a word that the
// host sees, and the next call of a kernel raises.
#pragma once

#include "cuda/driver.h"

#include <cstdint>

namespace torch_ort::cuda {

class Faults {
 public:
  explicit Faults(int device) : word_(device) {}
  void* word() const { return word_.device(); }  // of prelude.cuh's kBadLabel, kBadId
  // IndexError for what kernels have found since the last call.
  void check();

 private:
  HostWord word_;
};

// Of a device, for the life of the process.
Faults& faults(int device);

}  // namespace torch_ort::cuda
