// A convolution of images whose channels lie side by side, as kernels of its gradients see it;
// internal to cpu/.
#pragma once

#include "cpu/program.h"

#include <array>
#include <vector>

namespace torch_ort::cpu {

// The sizes of the gradient of a result [batch, rows, ...], of the image [batch, channels, ...] and
// of the weight [rows, channels of a group, ...]. Pairs are for the two dims of pixels.
struct Convolution {
  // The inputs of the node are the gradient and the image, its first output the gradient of the
  // weight, and its attributes say `strides`, `pads` and `dilations`. Throws InternalError on
  // operands that do not fit together, or whose channels are apart.
  explicit Convolution(const BoundNode& bound);

  int64_t batch = 0, channels = 0, rows = 0;
  std::array<int64_t, 2> stride{}, pad{}, dilation{}, image{}, result{}, window{};
  std::vector<int64_t> gradient_strides, image_strides;

  int64_t num_taps() const { return window[0] * window[1]; }
};

}  // namespace torch_ort::cpu
