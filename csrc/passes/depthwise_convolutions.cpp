// Convolutions of each channel by itself, and their gradients towards the image -> the engine's
//
//   y = torch_ort.DepthwiseConvolution(x, weight, bias)
//   dx = torch_ort.DepthwiseConvolution(dy, weight), transposed
//
// and the other way round where the convolution is transposed. Only on processors on which oneDNN's
// kernels are slower (region/codegen.h; figures are in benchmarks/results/decisions.md). Gradients
// towards the weight are those of convolution_weights.cpp. Declines row-major images, whose
// channels are apart.

#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

namespace torch_ort::passes {

namespace {

// With fewer, most lanes of a vector would be of no channel.
constexpr int64_t kLeastChannels = 8;

std::optional<ir::Attrs> attrs_of(const Convolution& it) {
  const ir::Dim& channels = (*it.x->type.shape)[1];
  const bool suits = it.suits_depthwise() && channels.is_constant() &&
                     channels.constant() >= kLeastChannels &&
                     region::prefers_own_convolutions(it.x);
  return suits ? std::optional(ir::Attrs()) : std::nullopt;
}

}  // namespace

int depthwise_convolutions(ir::Graph& graph, PassContext& context) {
  return convolve_by(graph, context, "DepthwiseConvolution", attrs_of);
}

}  // namespace torch_ort::passes
