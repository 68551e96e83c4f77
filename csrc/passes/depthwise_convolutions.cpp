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

bool suits(const Convolution& it) {
  const ir::Dim& channels = (*it.x->type.shape)[1];
  return it.is_depthwise() && channels.is_constant() && channels.constant() >= kLeastChannels &&
         region::prefers_own_convolutions(it.x);
}

}  // namespace

int depthwise_convolutions(ir::Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (ir::Node& node : graph.nodes) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !suits(*it) || !can_convolve(*it, sizes)) continue;
    if (!context.may_rewrite()) return rewrites;
    convolve_by(graph, node, *it, "DepthwiseConvolution", {});
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
