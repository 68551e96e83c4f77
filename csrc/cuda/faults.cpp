#include "cuda/faults.h"

#include "base/error.h"
#include "cuda/index_error.h"
#include "cuda/once.h"

#include <deque>
#include <memory>

namespace torch_ort::cuda {

namespace {

const char* words_of(Fault fault) {
  switch (fault) {
    case Fault::kBadLabel: return "Target is out of bounds";
    case Fault::kBadId: return "index out of range in self";
    case Fault::kBadPlace: return "index is out of bounds for its dimension";
  }
  throw InternalError("faults: got a number that is none");
}

}  // namespace

void Faults::check() {
  if (*static_cast<volatile const uint32_t*>(word_.host()) == 0) [[likely]] {
    return;
  }
  const uint32_t found = word_.take();
  // Another thread has raised the error.
  if (found == 0) return;
  raise_index_error(
      concat(words_of(static_cast<Fault>(found)), ": found by an earlier step on the GPU"));
}

void HostFaults::check() const {
  if (word_ != 0) raise_index_error(words_of(static_cast<Fault>(word_)));
}

Faults& faults(int device) {
  // Never destroyed, because kernels may still run when the process ends.
  static auto& all = *new std::deque<Once<std::unique_ptr<Faults>>>(
      static_cast<size_t>(Driver::get().num_devices()));
  return *all.at(static_cast<size_t>(device)).get([device] {
    return std::make_unique<Faults>(device);
  });
}

}  // namespace torch_ort::cuda
