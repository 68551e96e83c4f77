// Convolutions of images and their gradients, as passes read and replace them.
#pragma once

#include "ir/graph.h"
#include "ops/writer.h"
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
  // Whether it convolves each channel of images by itself, into one channel.
  bool is_depthwise() const;
  // Whether pads are at most what a window reaches over beside its first pixel; more is not worth a
  // case in the kernels.
  bool pads_within_windows() const;
  // Whether the bias, if there is one, has its numbers side by side.
  bool has_plain_bias() const { return bias == nullptr || !bias->type.strides; }
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

// The sum over the pixels of a channels-last image.
ir::Value* sum_pixels(ops::Writer& write, ir::Value& image);
// Whether kernels of the engine can compute the convolution by its definition, or of a gradient
// that of the image, which is a convolution in the other direction: it is of float32, and its
// images are channels-last.
bool can_convolve(const Convolution& it, const KnownSizes& sizes);
// Lets such a kernel do it. Its node has the convolution's strides, pads and dilations, `attrs`,
// and `transposed` in the direction from results to images.
void convolve_by(ir::Graph& graph, ir::Node& node, const Convolution& it, const char* op,
                 ir::Attrs attrs);
// Lets the gradient of a convolution compute what is read of it; erases it if that is nothing.
void compute_what_is_read(ir::Graph& graph, ir::Node& gradient);

// Whether the engine's convolution is chosen that multiplies less (cpu/winograd.cpp). Where sizes
// are symbols, those of the captured call decide.
bool suits_winograd(const ir::Graph& graph, const Convolution& it);

}  // namespace torch_ort::passes
