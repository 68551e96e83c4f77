// The autocast state of a thread as one integer, which autograd's nodes can keep as plain data.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_ort::run {

// The kinds of devices under autocast, each with its dtype. Others than CPU and CUDA do not count.
using AutocastState = std::vector<std::pair<c10::DeviceType, c10::ScalarType>>;

int64_t encode_autocast(const AutocastState& state);

// The state of the calling thread.
int64_t autocast_now();

}  // namespace torch_ort::run
