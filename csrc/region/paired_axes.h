// The dims of two tensors that a kernel walks at the same time.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_ort::region {

// The size of a dim with its strides in two tensors.
struct PairedAxis {
  int64_t size, a, b;
};

// Merges dims that are contiguous in both tensors, and drops dims of size 1.
std::vector<PairedAxis> merge(const std::vector<PairedAxis>& axes);

}  // namespace torch_ort::region
