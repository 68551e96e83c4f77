// Convolutions of each channel by itself, and their gradients towards the image -> the engine's
//
//   y = torch_ort.DepthwiseConvolution(x, weight, bias)
//   dx = torch_ort.DepthwiseConvolution(dy, weight), transposed
//
// and the other way round where the convolution is transposed. Only on processors on which oneDNN's
// kernels are slower (region/codegen.h; figures are in benchmarks/results/decisions.md). Gradients
// towards the weight are those of convolution_weights.cpp. Declines row-major images, whose
// channels are apart.

#include "ir/edit.h"
#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Value;

// With fewer, most lanes of a vector would be of no channel.
constexpr int64_t kLeastChannels = 8;

bool suits(const Convolution& it) {
  const Dim& channels = (*it.x->type.shape)[1];
  if (!it.is_depthwise() || !it.pads_within_windows()) return false;
  // Rows of a transposed result that no window reaches are not worth a case in the kernel.
  for (size_t dim = 0; it.is_transposed && dim < it.strides.size(); ++dim) {
    if (it.output_pads[dim].constant() >= it.strides[dim].constant()) return false;
  }
  return channels.is_constant() && channels.constant() >= kLeastChannels &&
         it.x->type.dtype == ir::DType::kFloat && it.weight->type.dtype == ir::DType::kFloat &&
         region::prefers_own_depthwise_convolutions(it.x);
}

// Computes `result` in the convolution's direction, or in the other one.
Value* convolve(ops::Writer& write, const Convolution& it, std::vector<Value*> operands,
                const Value& result, bool is_transposed) {
  ir::Attrs attrs = {{"dilations", it.dilations}, {"pads", it.pads}, {"strides", it.strides}};
  if (is_transposed) attrs["transposed"] = Dim(1);
  return write
      .add({ir::kTorchOrtDomain, "DepthwiseConvolution"}, std::move(operands), {result.type},
           std::move(attrs))
      .outputs[0];
}

}  // namespace

int depthwise_convolutions(Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (Node& node : graph.nodes) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !suits(*it)) continue;
    Value* const from = it->y != nullptr ? it->x : it->gradient;
    Value* const result = it->y != nullptr ? it->y : it->dx;
    if (!is_channels_last(from, sizes) || !is_channels_last(result, sizes)) continue;
    if (!context.may_rewrite()) return rewrites;
    ops::Writer write(graph, &node);
    std::vector<Value*> operands = {from, it->weight};
    if (it->bias != nullptr) operands.push_back(it->bias);
    const bool is_transposed = it->y != nullptr ? it->is_transposed : !it->is_transposed;
    ir::replace_uses(*result, *convolve(write, *it, std::move(operands), *result, is_transposed),
                     graph);
    if (it->y != nullptr) {
      ir::erase(graph, node);
    } else {
      compute_what_is_read(graph, node);
    }
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
