// The gradient of a convolution -> that towards the image, and that towards weight and bias, each a
// call of its own:
//
//   dx, dweight, dbias = convolution_backward(dy, x, weight)
//     -> dx = convolution_backward(dy, x, weight), and
//        dweight, dbias = convolution_backward(dy, x, weight)
//
// PyTorch's kernel computes the two one after the other anyway, so the bits are the same. The rest
// of the backward half waits for dx alone. So where weights are larger than images, as in the last
// stages of a network, the order of steps can hold x and dy instead of dweight until the memory of
// most that forward has saved is free. Declines where images are not much smaller: there is little
// to gain, and the second call copies the weight to the layout of channels-last images once more.
// Where sizes are symbols, those of the captured call decide.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Type;
using ir::Value;

using Mask = std::vector<std::string>;

constexpr size_t kImage = 0, kWeight = 1;  // outputs

// How many times as large as the images a weight has to be.
constexpr int64_t kLeastShare = 2;

int64_t count(const Graph& graph, const Value& value) {
  if (!value.type.is_known()) return 0;
  return hinted_size(graph, ir::numel(*value.type.shape)).value_or(0);
}

bool pays(const Graph& graph, const Node& node) {
  const ops::ImageForm form = ops::image_form(node);
  if (form.weight < 0 || !is_read(node, kImage) || !is_read(node, kWeight)) return false;
  const Value& weight = *node.inputs.at(form.weight);
  int64_t images = 0;
  for (int slot : form.inputs) images += count(graph, *node.inputs.at(slot));
  return ops::prefers_channels_last(weight.type.device) && images > 0 &&
         count(graph, weight) > kLeastShare * images;
}

}  // namespace

int split_convolutions(Graph& graph, PassContext& context) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || ops::key_of(node) != ops::aten::kConvolutionBackward) continue;
    if (!pays(graph, node)) continue;
    if (!context.may_rewrite()) return rewrites;
    std::vector<Type> types(node.outputs.size());
    types[kImage] = node.outputs[kImage]->type;
    Node& first = ops::Writer(graph, &node).copy(node, node.inputs, types);
    first.attrs["output_mask"] = Mask{"true", "false", "false"};
    ir::replace_uses(*node.outputs[kImage], *first.outputs[kImage], graph);
    Mask mask = ir::strings_attr(node.attrs, "output_mask", {});
    mask.at(kImage) = "false";
    node.attrs["output_mask"] = std::move(mask);
    node.outputs[kImage]->type = Type{.device = types[kImage].device};
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
