#include "run/autograd/autocast.h"

#include <ATen/autocast_mode.h>

namespace torch_ort::run {

namespace {

// One byte for each kind of device: 0 where autocast is off, else 1 + the dtype.
constexpr int shift_of(c10::DeviceType device) { return device == c10::kCPU ? 0 : 8; }

}  // namespace

int64_t encode_autocast(const AutocastState& state) {
  int64_t code = 0;
  for (const auto& [device, dtype] : state) {
    code |= (int64_t{1} + static_cast<int64_t>(dtype)) << shift_of(device);
  }
  return code;
}

int64_t autocast_now() {
  AutocastState state;
  for (const c10::DeviceType device : {c10::kCPU, c10::kCUDA}) {
    if (!at::autocast::is_autocast_enabled(device)) continue;
    state.emplace_back(device, at::autocast::get_autocast_dtype(device));
  }
  return encode_autocast(state);
}

}  // namespace torch_ort::run
