// Convolutions -> those of the engine by the definition (cpu/convolution_product.cpp)
//
//   y = torch_ort.Convolution(x, weight, bias)
//   dx = torch_ort.Convolution(dy, weight), transposed
//
// and transposed ones the other way round, for processors on which oneDNN's kernels are slower
// (region/codegen.h; figures are in benchmarks/results/decisions.md). What multiplies less, and
// what is a product as it stands, is computed by other passes. Gradients towards the weight are
// those of convolution_weights.cpp. Declines row-major images, whose channels are apart, and
// weights and biases that are views of others.

#include "ops/channels_last.h"
#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

namespace torch_ort::passes {

namespace {

// Of a group. With fewer channels of the image oneDNN's kernels take those of several pixels at
// once, and with fewer of the result most lanes of a vector would be of none.
constexpr int64_t kLeastChannels = 16;

bool suits(const Convolution& it) {
  const ir::Shape& weight = *it.weight->type.shape;
  if (!weight[0].is_constant() || !weight[1].is_constant() || !it.groups.is_constant() ||
      it.groups.constant() <= 0) {
    return false;
  }
  const ir::Type& type = it.weight->type;
  if ((type.strides && !ops::has_channels_last(type)) || !it.has_plain_bias()) return false;
  return weight[0].constant() / it.groups.constant() >= kLeastChannels &&
         weight[1].constant() >= kLeastChannels && region::prefers_own_convolutions(it.x);
}

}  // namespace

int convolution_products(ir::Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (ir::Node& node : graph.nodes) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !suits(*it) || !can_convolve(*it, sizes)) continue;
    if (!context.may_rewrite()) return rewrites;
    convolve_by(graph, node, *it, "Convolution", {{"groups", it->groups}});
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
