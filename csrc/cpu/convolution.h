// A convolution of images whose channels lie side by side, as kernels of its gradients see it;
// internal to cpu/.
#pragma once

#include "base/error.h"
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

// Whether the channels of an image lie side by side.
bool is_side_by_side(const region::Layout& layout);

// Makes K<T> for the dtype of the first result. Throws InternalError if that is neither float32 nor
// float64.
template <template <typename> typename K>
std::unique_ptr<const Kernel> make_of_dtype(const BoundNode& bound) {
  const ir::DType dtype = bound.outputs.at(0).dtype;
  if (dtype == ir::DType::kDouble) return std::make_unique<const K<double>>(bound);
  ORT_CHECK(dtype == ir::DType::kFloat, bound.node.op.name, ": got ", ir::name(dtype),
            ", want float32 or float64");
  return std::make_unique<const K<float>>(bound);
}

}  // namespace torch_ort::cpu
