// How nodes treat channels-last images: tensors (N, C, H, W) with the strides of a row-major (N, H,
// W, C). Volumes (N, C, D, H, W) are images, too.
#pragma once

#include "ir/graph.h"

#include <map>
#include <optional>
#include <vector>

namespace torch_ort::ops {

// Whether tensors of so many dims may be images.
bool is_image_rank(size_t rank);
// The permutation from (N, C, H, W) to (N, H, W, C), and its inverse.
ir::Shape to_last(size_t rank);
ir::Shape to_first(size_t rank);

// The shape (N, H, W, C) of an image of shape (N, C, H, W).
ir::Shape channels_last_shape(const ir::Shape& shape);
// The channels-last strides of an image of shape (N, C, H, W).
ir::Shape channels_last_strides(const ir::Shape& shape);
// Whether the type has channels-last strides. False for images that are both channels-last and
// row-major, such as those with one channel.
bool has_channels_last(const ir::Type& type);
// Whether row-major and channels-last are the same order of elements for this shape.
bool is_either_layout(const ir::Shape& shape);

// Whether the device's convolutions and poolings are faster on channels-last images. Those of
// oneDNN are, on the CPU.
bool prefers_channels_last(const ir::Device& device);

struct ImageForm {
  enum class Kind {
    kNone,  // nothing is known
    // A kernel that is correct for either layout, and whose results have the layout of its images.
    kKernel,
    // Element by element. Operands with one number for each channel, for each image or in all may
    // be broadcast.
    kPointwise,
    kReduction,  // along axes that are known
    kExpand,
    // Moves elements along axes that its attributes or inputs name (ImageRule::rename_axes).
    kAxes,
  } kind = Kind::kNone;
  // For a kernel: which inputs and outputs are images.
  std::vector<int> inputs, outputs;
  // For a convolution and its gradient: the input that is the weight. -1: there is none.
  int weight = -1;
  // The output that is the gradient of the weight, whose layout follows that of the images. -1:
  // there is none.
  int weight_gradient = -1;
};

// A node that names axes, rewritten for images (N, H, W, C).
struct RenamedAxes {
  ir::Attrs attrs;
  // By input: the integers to read instead of the node's own.
  std::map<int, ir::Shape> ints;
};

// The position in (N, H, W, C) of an axis of (N, C, H, W).
int64_t channels_last_axis(const ir::Node& node, int64_t axis, size_t rank);

// What the row of an op or operator says about images. Element-wise ops and reductions along axes
// need no rule.
struct ImageRule {
  ImageForm::Kind kind = ImageForm::Kind::kNone;
  // For a kernel: which arguments of the operator are images. For an op it is the first input.
  std::vector<const char*> reads;
  int num_images = 1;  // how many of the first outputs are images
  bool is_convolution = false;
  // PyTorch's kernel takes images with any number of dims of pixels.
  bool takes_any_rank = false;
  // PyTorch's kernel makes row-major volumes of volumes of either layout.
  bool is_for_planes = false;
  // PyTorch's kernel is correct only if its first image is in the layout that is asked for.
  bool wants_first_image = false;
  // For a node that names axes: rewrites it for (N, H, W, C). Returns nothing if the axes, or the
  // sizes of the results, depend on data. All inputs and results of the rank of images are images.
  std::optional<RenamedAxes> (*rename_axes)(const ir::Node& node) = nullptr;
};

// The form of a node, by its op and attributes. Shapes are not looked at.
ImageForm image_form(const ir::Node& node);

}  // namespace torch_ort::ops
