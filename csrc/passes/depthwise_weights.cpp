// The gradient of a convolution of each channel by itself -> that of the image, by PyTorch, and
//
//   dweight, dbias = torch_ort.DepthwiseWeightGrad(dy, x)
//
// oneDNN has fast kernels for small windows alone: for 7x7 ones, as of ConvNeXt, its gradient of
// the weight takes several times as long as all else of the convolution
// (benchmarks/results/decisions.md). Declines row-major images, whose channels are apart.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"
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

// The widest window for which oneDNN's kernels are as fast.
constexpr int64_t kWidestOfLibrary = 3;

constexpr size_t kImage = 0, kWeight = 1, kBias = 2;  // outputs

std::optional<Shape> numbers(const ops::Arg& arg) {
  Shape found;
  for (const ops::Arg& each : std::get<ops::ArgList>(arg.value)) {
    const auto* dim = std::get_if<Dim>(&each.value);
    if (dim == nullptr || !dim->is_constant()) return std::nullopt;
    found.push_back(*dim);
  }
  return found.size() == 2 ? std::optional(found) : std::nullopt;
}

bool is_channels_last(const Value* value, const KnownSizes& sizes) {
  return value != nullptr && value->type.is_known() &&
         value->type.shape->size() == ops::kImageRank && sizes.are_known(*value) &&
         ops::has_channels_last(value->type);
}

// The attributes of the node that computes the gradients of weight and bias; nothing if it would
// not be faster.
std::optional<ir::Attrs> find(const Node& node, const KnownSizes& sizes) {
  if (node.is_erased() || ops::key_of(node) != ops::aten::kConvolutionBackward) return std::nullopt;
  if (!is_read(node, kWeight)) return std::nullopt;
  const ops::Call call = ops::decode_aten(node);
  const Value *dy = tensor(call.args.at(0)), *x = tensor(call.args.at(1)),
              *weight = tensor(call.args.at(2)), *result = node.outputs[kWeight];
  if (!is_channels_last(dy, sizes) || !is_channels_last(x, sizes)) return std::nullopt;
  if (weight == nullptr || !weight->type.is_known() || result->type.strides) return std::nullopt;
  if (!region::has_kernel(dy, "DepthwiseWeightGrad") || !result->type.is_known()) return {};
  const auto* is_transposed = std::get_if<bool>(&call.args.at(7).value);
  const auto* groups = std::get_if<Dim>(&call.args.at(9).value);
  const Shape& window = *weight->type.shape;
  const Dim& channels = (*x->type.shape)[1];
  const bool is_depthwise = is_transposed != nullptr && !*is_transposed && groups != nullptr &&
                            *groups == channels && window.size() == ops::kImageRank &&
                            window[0] == channels && window[1] == Dim(1);
  if (!is_depthwise || dy->type.dtype != DType::kFloat) return std::nullopt;
  if (!window[2].is_constant() || !window[3].is_constant()) return std::nullopt;
  if (window[3].constant() <= kWidestOfLibrary) return std::nullopt;
  const auto strides = numbers(call.args.at(4)), pads = numbers(call.args.at(5)),
             dilations = numbers(call.args.at(6));
  if (!strides || !pads || !dilations) return std::nullopt;
  // The kernel keeps rows with their padding, of which more than this would be for nothing.
  for (size_t dim = 0; dim < 2; ++dim) {
    if ((*pads)[dim].constant() >= window[2 + dim].constant()) return std::nullopt;
  }
  return ir::Attrs{{"dilations", *dilations}, {"pads", *pads}, {"strides", *strides}};
}

}  // namespace

int depthwise_weights(Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (Node& node : graph.nodes) {
    std::optional<ir::Attrs> attrs = find(node, sizes);
    if (!attrs) continue;
    if (!context.may_rewrite()) return rewrites;
    std::vector<ir::Type> types = {node.outputs[kWeight]->type};
    const bool has_bias = is_read(node, kBias);
    if (has_bias) types.push_back(node.outputs[kBias]->type);
    const Node& made = ops::Writer(graph, &node)
                           .add({ir::kTorchOrtDomain, "DepthwiseWeightGrad"},
                                {node.inputs[0], node.inputs[1]}, types, std::move(*attrs));
    for (size_t i = 0; i < types.size(); ++i) {
      ir::replace_uses(*node.outputs[kWeight + i], *made.outputs[i], graph);
      node.outputs[kWeight + i]->type = ir::Type{.device = types[i].device};
    }
    node.attrs["output_mask"] = std::vector<std::string>{"true", "false", "false"};
    if (!is_read(node, kImage)) ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
