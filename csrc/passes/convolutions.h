// Convolutions of images and their gradients, as passes read and replace them.
#pragma once

#include "ir/graph.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/known_sizes.h"

#include <optional>

namespace torch_ort::passes {

// A convolution, or its gradient. What is not there, or not read, is nullptr.
struct Convolution {
  ir::Value *gradient = nullptr, *x = nullptr, *weight = nullptr, *bias = nullptr;
  ir::Value *y = nullptr, *dx = nullptr, *dweight = nullptr, *dbias = nullptr;
  // Constants, for the dims of pixels: two, or three of volumes.
  ir::Shape strides, pads, dilations, output_pads;
  ir::Dim groups;
  bool is_transposed = false;

  bool moves() const;  // whether it has strides, dilation or groups, or is transposed
  bool is_of_volumes() const { return pads.size() > 2; }
  // Whether it convolves each channel of images by itself, into one channel, and has a dtype that
  // the engine's kernels for those compute with.
  bool suits_depthwise() const;
  // Whether pads are at most what a window reaches over beside its first pixel; more is not worth a
  // case in the kernels.
  bool pads_within_windows() const;
  // Whether the bias, if there is one, has its numbers side by side.
  bool has_plain_bias() const { return bias == nullptr || !bias->type.strides; }
  // Whether the weight is no view of another: it has one of the two layouts of images.
  bool has_plain_weight() const;
  // Whether windows have this size along all dims.
  bool has_windows_of(int64_t size) const;
};

// Returns nothing for other nodes, for convolutions of one dim, for sizes of windows
// and steps that are not constant, and where images are padded by a call of their own.
std::optional<Convolution> find_convolution(const ir::Node& node);

// Whether an image is known to be channels-last, and not row-major as well.
bool is_channels_last(const ir::Value* value, const KnownSizes& sizes);
// Whether pixels are the rows of a matrix in memory: either layout may be it.
bool has_pixels_as_rows(const ir::Type& type);

// A view, of that type, of a tensor that has the numbers of an image in the order (N, H, W, C). The
// type has pixels as rows.
ir::Value* image_of_rows(ops::Writer& write, ir::Value& rows, const ir::Type& type);
// The sum over the pixels of a channels-last image.
ir::Value* sum_pixels(ops::Writer& write, ir::Value& image);
// Lets a kernel of the engine compute convolutions by their definition, and of gradients that of
// the image, which is a convolution in the other direction: where images are channels-last and
// `attrs_of`, which has to look at the dtype, gives what the kernel's node says beside strides,
// pads, dilations and, in the direction from results to images, `transposed`. Returns how many.
int convolve_by(ir::Graph& graph, PassContext& context, const char* op,
                std::optional<ir::Attrs> (*attrs_of)(const Convolution& it));
// Lets the gradient of a convolution compute what is read of it; erases it if that is nothing.
void compute_what_is_read(ir::Graph& graph, ir::Node& gradient);

// Whether the engine's convolution is chosen that multiplies less (cpu/winograd.cpp). Where sizes
// are symbols, those of the captured call decide.
bool suits_winograd(const ir::Graph& graph, const Convolution& it);

}  // namespace torch_ort::passes
