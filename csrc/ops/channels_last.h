// What nodes do with images whose channels stand last in memory: tensors (N, C, H, W) with the
// strides of a row-major (N, H, W, C).
#pragma once

#include "ir/graph.h"

#include <map>
#include <optional>
#include <vector>

namespace torch_ort::ops {

constexpr size_t kImageRank = 4;
// Axes of (N, C, H, W) in the order of (N, H, W, C), and back.
inline constexpr int64_t kToLast[kImageRank] = {0, 2, 3, 1};
inline constexpr int64_t kToFirst[kImageRank] = {0, 3, 1, 2};

// The shape (N, H, W, C) of an image (N, C, H, W).
ir::Shape channels_last_shape(const ir::Shape& shape);
// Strides of an image whose channels stand last.
ir::Shape channels_last_strides(const ir::Shape& shape);
// Whether the strides of the type say that channels stand last. Of images that may be either, as
// those of one channel, no.
bool has_channels_last(const ir::Type& type);
// Whether both orders of axes list the elements in one order.
bool is_either_layout(const ir::Shape& shape);

// Whether convolutions and poolings of the device are faster on images whose channels stand last:
// oneDNN's are, on the CPU.
bool prefers_channels_last(const ir::Device& device);

struct ImageForm {
  enum class Kind {
    kNone,       // nothing is known
    kKernel,     // makes images in the layout of those that it reads, and is as right in either
    kPointwise,  // element by element; numbers for channels, images or all may be stretched
    kReduction,  // along known axes
    kExpand,
    kAxes,  // moves elements along axes that it names (ImageRule::rename_axes)
  } kind = Kind::kNone;
  // Of a kernel: which inputs and outputs are images.
  std::vector<int> inputs, outputs;
  // Of a convolution, or its gradient: the input that holds the weight; else -1.
  int weight = -1;
  // The output that is the gradient of the weight: its layout follows that of the images.
  int weight_gradient = -1;
};

// What a node that names axes says of images (N, H, W, C).
struct RenamedAxes {
  ir::Attrs attrs;
  std::map<int, ir::Shape> ints;  // by slot: integers that it reads in place of others
};

// Where an axis of (N, C, H, W) stands in (N, H, W, C).
int64_t channels_last_axis(const ir::Node& node, int64_t axis);

// What a row says of it. Element-wise work and reductions along axes need nothing here.
struct ImageRule {
  ImageForm::Kind kind = ImageForm::Kind::kNone;
  // Of a kernel: the arguments of an operator that are images; of an op it is the first input.
  std::vector<const char*> reads;
  int num_images = 1;  // the first outputs
  bool is_convolution = false;
  // Of a kernel that PyTorch has right only where its first image is asked for.
  bool wants_first_image = false;
  // Of one that names axes: what it says of (N, H, W, C); nothing where data tells the axes, or
  // sizes of the results. All its inputs and results of the rank of images are images.
  std::optional<RenamedAxes> (*rename_axes)(const ir::Node& node) = nullptr;
};

// By op and attributes; nothing is said about shapes.
ImageForm image_form(const ir::Node& node);

}  // namespace torch_ort::ops
