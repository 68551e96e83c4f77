// The gradient of a convolution -> that of the image, by PyTorch, and for each channel by itself
//
//   dweight, dbias = torch_ort.DepthwiseWeightGrad(dy, x)
//
// or for others
//
//   dweight = torch_ort.ConvolutionWeightGrad(dy, x)
//   dbias = ReduceSum(dy)
//
// oneDNN has fast kernels of the first kind for small windows alone: for 7x7 ones, as of ConvNeXt,
// its gradient of the weight takes several times as long as all else of the convolution. On some
// processors it has fast ones of neither kind (region/codegen.h), but of the second for single
// pixels and images of few channels. Figures are in benchmarks/results/decisions.md. And those of
// single pixels with strides write beyond oneDNN's own memory, if an image has few channels: the
// engine computes these on all processors, of transposed convolutions, too. Declines row-major
// images, whose channels are apart.

#include "ir/edit.h"
#include "ops/channels_last.h"
#include "passes/context.h"
#include "passes/convolutions.h"
#include "region/codegen.h"

#include <optional>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// The widest window for which oneDNN's kernels for channels by themselves are as fast.
constexpr int64_t kWidestOfLibrary = 3;
// So many channels of a group fill a panel of a product with AVX2, or half of one. They also fill a
// block of oneDNN's kernels with AVX-512, which others have blocks of half as many for.
constexpr int64_t kLeastChannels = 16;

// What computes the gradient of a weight in place of PyTorch, whose kernel is slower or wrong.
struct Found {
  const char* op;
  ir::Attrs attrs;
  bool gives_bias = false;  // if that is read, as its second result
};

// Whether the kernels compute the gradient towards the weight.
bool can_compute(const Convolution& it, const KnownSizes& sizes) {
  if (it.dweight == nullptr) return false;
  return is_channels_last(it.gradient, sizes) && is_channels_last(it.x, sizes) &&
         it.pads_within_windows();
}

std::optional<Found> find_depthwise(const Convolution& it) {
  if (it.is_transposed || !it.suits_depthwise()) return std::nullopt;
  // With one channel in a group, weights lie by rows with channels last, too.
  if (it.dweight->type.strides && !ops::has_channels_last(it.dweight->type)) return std::nullopt;
  if (!region::has_kernel(it.x, "DepthwiseWeightGrad")) return std::nullopt;
  const bool is_narrow = it.weight->type.shape->back().constant() <= kWidestOfLibrary;
  if (is_narrow && !region::prefers_own_convolutions(it.x)) return std::nullopt;
  return Found{"DepthwiseWeightGrad", {}, true};
}

// Whether oneDNN's kernel is wrong: it copies the pixels that are read side by side, with steps of
// a whole block of channels, into memory for as many channels as there are
// (github.com/uxlfoundation/oneDNN/issues/6035).
bool is_beyond_library(const Convolution& it) {
  const bool has_strides = !(it.strides == Shape(it.strides.size(), Dim(1)));
  return has_strides && it.has_windows_of(1) && it.groups == Dim(1) &&
         (*it.weight->type.shape)[1].constant() < kLeastChannels;
}

std::optional<Found> find_dense(const Convolution& it) {
  if (it.x->type.dtype != DType::kFloat) return std::nullopt;
  const Dim& channels = (*it.weight->type.shape)[1];  // of a group
  if (!it.groups.is_constant() || !channels.is_constant()) return std::nullopt;
  const bool is_fast = region::prefers_own_convolutions(it.x) && !it.is_transposed &&
                       channels.constant() >= kLeastChannels && !it.has_windows_of(1);
  if (!region::has_kernel(it.x, "ConvolutionWeightGrad")) return std::nullopt;
  if (!is_fast && !is_beyond_library(it)) return std::nullopt;
  if (!has_pixels_as_rows(it.dweight->type)) return std::nullopt;
  return Found{"ConvolutionWeightGrad", {{"groups", it.groups}}};
}

}  // namespace

int convolution_weights(Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (Node& node : graph.nodes) {
    const std::optional<Convolution> it = find_convolution(node);
    if (!it || !can_compute(*it, sizes)) continue;
    std::optional<Found> found = find_depthwise(*it);
    if (!found) found = find_dense(*it);
    if (!found) continue;
    if (!context.may_rewrite()) return rewrites;
    ops::Writer write(graph, &node);
    std::vector<ir::Type> types = {it->dweight->type};
    if (it->dbias != nullptr && found->gives_bias) types.push_back(it->dbias->type);
    found->attrs.insert(
        {{"strides", it->strides}, {"pads", it->pads}, {"dilations", it->dilations}});
    // A transposed convolution is one whose result is its image, and whose image is its result.
    std::vector<Value*> operands = {it->gradient, it->x};
    if (it->is_transposed) std::swap(operands[0], operands[1]);
    const Node& made = write.add({ir::kTorchOrtDomain, found->op}, std::move(operands), types,
                                 std::move(found->attrs));
    ir::replace_uses(*it->dweight, *made.outputs[0], graph);
    if (it->dbias != nullptr) {
      Value* sum = found->gives_bias ? made.outputs[1] : sum_pixels(write, *it->gradient);
      ir::replace_uses(*it->dbias, *sum, graph);
    }
    compute_what_is_read(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
