#include "cuda/stream.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

namespace torch_ort::cuda {

void* current_stream(int device) {
  return at::accelerator::getCurrentStream(static_cast<c10::DeviceIndex>(device)).native_handle();
}

struct Scratch::Memory {
  c10::DataPtr data;
};

// The allocator takes memory of the current device, so `device` must be that.
Scratch::Scratch(int64_t num_bytes, int device) {
  if (num_bytes == 0) return;
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  memory_ = std::make_unique<Memory>();
  memory_->data = c10::GetAllocator(c10::kCUDA)->allocate(static_cast<size_t>(num_bytes));
}

Scratch::~Scratch() = default;
Scratch::Scratch(Scratch&&) noexcept = default;
Scratch& Scratch::operator=(Scratch&&) noexcept = default;

void* Scratch::data() const { return memory_ ? memory_->data.get() : nullptr; }

}  // namespace torch_ort::cuda
