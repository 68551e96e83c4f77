// A convolution of images whose channels lie side by side, as its kernels and those of its
// gradients see it; internal to cpu/.
#pragma once

#include "base/error.h"
#include "cpu/program.h"

#include <array>
#include <string>
#include <vector>

namespace torch_ort::cpu {

// The sizes of the gradient of a result [batch, rows, ...], of the image [batch, channels, ...] and
// of the weight [rows, channels of a group, ...], of images or of volumes.
struct Convolution {
  // The inputs of the node are the gradient and the image, its first output the gradient of the
  // weight, and its attributes say `strides`, `pads` and `dilations`. Throws InternalError on
  // operands that do not fit together, or whose channels are apart.
  explicit Convolution(const BoundNode& bound);
  // The same of a node with those attributes and any order of operands.
  Convolution(const ir::Node& node, const region::Layout& of_result, const region::Layout& of_image,
              const region::Layout& weight);

  bool is_volume = false;
  int64_t batch = 0, channels = 0, rows = 0;
  // Of planes, rows and columns of pixels. Images that are no volumes have one plane.
  std::array<int64_t, 3> stride{1}, pad{}, dilation{1}, image{1}, result{1}, window{1};
  // From one image, plane, row and column to the next.
  std::array<int64_t, 4> gradient_strides{}, image_strides{};

  // The groups that a node says, for a weight [rows, channels of a group, ...]. Throws
  // InternalError if they do not divide its channels and rows.
  int64_t read_groups(const ir::Node& node, const region::Layout& weight) const;
  int64_t num_taps() const { return window[0] * window[1] * window[2]; }
  // "8 x 8", of volumes "4 x 8 x 8".
  std::string text(const std::array<int64_t, 3>& sizes) const;
};

// Places along one dim of what is computed, which the same taps reach: all places of a convolution,
// or those of a transposed one that are as far apart as its strides. Place p is pixel first +
// p * apart of the result. Its taps read pixels p * step + begin of the image, if these exist.
struct Reach {
  struct Tap {
    int64_t index, begin;
  };
  int64_t first = 0, apart = 1, places = 0, step = 1;
  std::vector<Tap> taps;  // in the order of the pixels
};
// The places of all pixels of the result along a dim: planes, rows or columns. A transposed
// convolution makes images from results.
std::vector<Reach> reaches_of(const Convolution& it, size_t dim, bool is_transposed);

// The strides of images, planes, rows and columns of pixels: of all dims but the channels. Where a
// tensor has no planes, that of planes is 0.
std::array<int64_t, 4> pixel_strides(const region::Layout& layout);
// Throws InternalError if a bias has not the dtype and a number for each of the channels of a
// node's result, or, where a kernel wants that, not side by side.
void check_bias(const ir::Node& node, const region::Layout& bias, ir::DType dtype, int64_t channels,
                bool wants_rows);
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
