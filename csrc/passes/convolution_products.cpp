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

#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

namespace torch_ort::passes {

namespace {

// Of a group. With fewer channels of the image oneDNN's kernels take those of several pixels at
// once, and with fewer of the result most lanes of a vector would be of none.
constexpr int64_t kLeastChannels = 16;

std::optional<ir::Attrs> attrs_of(const Convolution& it) {
  const ir::Shape& weight = *it.weight->type.shape;
  const ir::Dim &rows = weight[0], &channels = weight[1];
  if (!rows.is_constant() || !channels.is_constant() || !it.groups.is_constant() ||
      it.groups.constant() <= 0) {
    return std::nullopt;
  }
  const bool is_wide = rows.constant() / it.groups.constant() >= kLeastChannels &&
                       channels.constant() >= kLeastChannels;
  if (it.x->type.dtype != ir::DType::kFloat || !it.has_plain_weight() || !it.has_plain_bias() ||
      !is_wide || !region::prefers_own_convolutions(it.x)) {
    return std::nullopt;
  }
  return ir::Attrs{{"groups", it.groups}};
}

}  // namespace

int convolution_products(ir::Graph& graph, PassContext& context) {
  return convolve_by(graph, context, "Convolution", attrs_of);
}

}  // namespace torch_ort::passes
