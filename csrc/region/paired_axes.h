// The dims of two tensors that a kernel walks at the same time.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_ort::region {

// The size of a dim with its strides in two tensors.
struct PairedAxis {
  int64_t size, a, b;
};

struct PairedOffsets {
  int64_t a = 0, b = 0;
};

// The offsets of an element. Elements are numbered over all dims, with the last dim varying
// fastest.
inline PairedOffsets offsets_of(const std::vector<PairedAxis>& axes, int64_t element) {
  PairedOffsets offsets;
  for (size_t i = axes.size(); i-- > 0;) {
    const int64_t at = i == 0 ? element : element % axes[i].size;
    offsets.a += at * axes[i].a;
    offsets.b += at * axes[i].b;
    element /= axes[i].size;
  }
  return offsets;
}

// Merges dims that are contiguous in both tensors, and drops dims of size 1.
std::vector<PairedAxis> merge(const std::vector<PairedAxis>& axes);

}  // namespace torch_ort::region
