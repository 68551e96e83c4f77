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
// its gradient of the weight takes several times as long as all else of the convolution. Those of
// the second kind are slow on processors with 16 registers (region/codegen.h), but for single
// pixels and images of few channels. Figures are in benchmarks/results/decisions.md. And those of
// single pixels with strides write beyond oneDNN's own memory, if an image has few channels: the
// engine computes these on all processors, of transposed convolutions, too. Declines row-major
// images, whose channels are apart.

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

// The widest window for which oneDNN's kernels for channels by themselves are as fast.
constexpr int64_t kWidestOfLibrary = 3;
// So many channels of a group fill a panel of a product. They also fill a block of oneDNN's kernels
// with AVX-512, which others have blocks of half as many for.
constexpr int64_t kLeastChannels = 16;

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

// What computes the gradient of a weight in place of PyTorch, whose kernel is slower or wrong.
struct Found {
  const char* op;
  ir::Attrs attrs;
  bool gives_bias = false;  // if that is read, as its second result
};

// The gradient of a convolution towards its weight. That of a transposed convolution is the one of
// a convolution whose result is its image, and whose image is its result.
struct Gradient {
  Value *of_result, *image;  // the operands of what computes it
  const Value* weight;
  Shape window;  // of the weight: rows, channels of a group, pixels
  Dim groups;
  Shape strides, pads, dilations;
  bool is_transposed;
};

std::optional<Gradient> find_gradient(const Node& node, const KnownSizes& sizes) {
  if (node.is_erased() || ops::key_of(node) != ops::aten::kConvolutionBackward) return std::nullopt;
  if (!is_read(node, kWeight)) return std::nullopt;
  const ops::Call call = ops::decode_aten(node);
  Value *dy = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  const Value *weight = tensor(call.args.at(2)), *result = node.outputs[kWeight];
  if (!is_channels_last(dy, sizes) || !is_channels_last(x, sizes)) return std::nullopt;
  if (weight == nullptr || !weight->type.is_known() || !result->type.is_known()) return {};
  const auto* is_transposed = std::get_if<bool>(&call.args.at(7).value);
  const auto* groups = std::get_if<Dim>(&call.args.at(9).value);
  const Shape& window = *weight->type.shape;
  if (is_transposed == nullptr || groups == nullptr) return std::nullopt;
  if (window.size() != ops::kImageRank || dy->type.dtype != DType::kFloat) return std::nullopt;
  if (!window[2].is_constant() || !window[3].is_constant()) return std::nullopt;
  const auto strides = numbers(call.args.at(4)), pads = numbers(call.args.at(5)),
             dilations = numbers(call.args.at(6));
  if (!strides || !pads || !dilations) return std::nullopt;
  // A window that lies in the padding alone is not worth a case in the kernels.
  for (size_t dim = 0; dim < 2; ++dim) {
    if ((*pads)[dim].constant() >= window[2 + dim].constant()) return std::nullopt;
  }
  if (*is_transposed) std::swap(dy, x);
  return Gradient{.of_result = dy,
                  .image = x,
                  .weight = result,
                  .window = window,
                  .groups = *groups,
                  .strides = *strides,
                  .pads = *pads,
                  .dilations = *dilations,
                  .is_transposed = *is_transposed};
}

std::optional<Found> find_depthwise(const Gradient& it) {
  const Dim& channels = (*it.image->type.shape)[1];
  if (it.is_transposed || !(it.groups == channels) || !(it.window[0] == channels) ||
      !(it.window[1] == Dim(1)) || it.weight->type.strides) {
    return std::nullopt;
  }
  // oneDNN is slow for wide windows of its own kind alone.
  if (!region::has_kernel(it.image, "DepthwiseWeightGrad")) return std::nullopt;
  if (it.window[3].constant() <= kWidestOfLibrary) return std::nullopt;
  return Found{"DepthwiseWeightGrad", {}, true};
}

// Whether oneDNN's kernel is wrong: it copies the pixels that are read side by side, with steps of
// a whole block of channels, into memory for as many channels as there are
// (github.com/uxlfoundation/oneDNN/issues/6035).
bool is_beyond_library(const Gradient& it) {
  const Dim one(1);
  const bool has_strides = !(it.strides[0] == one) || !(it.strides[1] == one);
  return has_strides && it.window[2] == one && it.window[3] == one && it.groups == one &&
         it.window[1].constant() < kLeastChannels;
}

std::optional<Found> find_dense(const Gradient& it) {
  if (!it.groups.is_constant() || !it.window[1].is_constant()) return std::nullopt;
  const auto is_fast = [&] {
    return region::prefers_own_convolutions(it.image) && !it.is_transposed &&
           it.window[1].constant() >= kLeastChannels &&
           !(it.window[2] == Dim(1) && it.window[3] == Dim(1));
  };
  if (!region::has_kernel(it.image, "ConvolutionWeightGrad")) return std::nullopt;
  if (!is_beyond_library(it) && !is_fast()) return std::nullopt;
  const bool is_last = it.weight->type.strides ? ops::has_channels_last(it.weight->type)
                                               : ops::is_either_layout(*it.weight->type.shape);
  if (!is_last) return std::nullopt;
  return Found{"ConvolutionWeightGrad", {{"groups", it.groups}}};
}

}  // namespace

int convolution_weights(Graph& graph, PassContext& context) {
  int rewrites = 0;
  const KnownSizes sizes(graph);
  for (Node& node : graph.nodes) {
    const std::optional<Gradient> it = find_gradient(node, sizes);
    if (!it) continue;
    std::optional<Found> found = find_depthwise(*it);
    if (!found) found = find_dense(*it);
    if (!found) continue;
    if (!context.may_rewrite()) return rewrites;
    ops::Writer write(graph, &node);
    const bool has_bias = is_read(node, kBias);
    std::vector<ir::Type> types = {node.outputs[kWeight]->type};
    if (has_bias && found->gives_bias) types.push_back(node.outputs[kBias]->type);
    found->attrs.insert(
        {{"strides", it->strides}, {"pads", it->pads}, {"dilations", it->dilations}});
    const Node& made = write.add({ir::kTorchOrtDomain, found->op}, {it->of_result, it->image},
                                 types, std::move(found->attrs));
    std::vector<Value*> results = made.outputs;
    if (has_bias && !found->gives_bias) {
      Value* last =
          write.transpose(node.inputs[0], Shape(std::begin(ops::kToLast), std::end(ops::kToLast)));
      results.push_back(write.reduce("ReduceSum", last, {0, 1, 2}, false));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      Value& old = *node.outputs[kWeight + i];
      const ir::Device device = old.type.device;
      ir::replace_uses(old, *results[i], graph);
      old.type = ir::Type{.device = device};
    }
    node.attrs["output_mask"] = std::vector<std::string>{"true", "false", "false"};
    if (!is_read(node, kImage)) ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
