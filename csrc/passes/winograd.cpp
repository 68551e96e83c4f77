// Convolutions of 3x3, of volumes 3x3x3, and their gradients -> those that multiply less
// (cpu/winograd.cpp)
//
//   y = torch_ort.WinogradConvolution(x, weight, bias)
//
//   dx = torch_ort.WinogradConvolution(dy, weight)
//   dweight = torch_ort.WinogradWeightGrad(dy, x)
//   dbias = ReduceSum(dy)
//
// where dx has the weight turned by half a turn. Declines where little would be saved
// (suits_winograd), row-major images, whose channels are apart, and biases that are views of
// others. PyTorch computes what it declines.

#include "ir/edit.h"
#include "passes/context.h"
#include "passes/convolutions.h"

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

class Rewriter {
 public:
  explicit Rewriter(Graph& graph) : graph_(graph), sizes_(graph) {}

  int run(PassContext& context) {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      std::optional<Convolution> found = find_convolution(node);
      if (!found || !suits_winograd(graph_, *found)) continue;
      keep_layouts(*found);
      if (found->y == nullptr && found->dx == nullptr && found->dweight == nullptr) continue;
      if (!context.may_rewrite()) return rewrites;
      ops::Writer write(graph_, &node);
      if (found->y != nullptr) {
        replace(*found->y, *convolve(write, *found));
        ir::erase(graph_, node);
      } else {
        rewrite_gradients(write, *found);
        compute_what_is_read(graph_, node);
      }
      ++rewrites;
    }
    return rewrites;
  }

 private:
  bool is_last(const Value* value) const { return is_channels_last(value, sizes_); }

  // Forgets results that cannot be computed in the layouts that the operands have.
  void keep_layouts(Convolution& found) const {
    if (!is_last(found.y) || !is_last(found.x) || !found.has_plain_bias()) found.y = nullptr;
    if (!is_last(found.dx) || !is_last(found.gradient)) found.dx = nullptr;
    if (!is_last(found.dweight) || !is_last(found.x) || !is_last(found.gradient)) {
      found.dweight = nullptr;
    }
  }

  static Value* convolve(ops::Writer& write, const Convolution& found) {
    std::vector<Value*> inputs = {found.x, found.weight};
    if (found.bias != nullptr) inputs.push_back(found.bias);
    return write
        .add({ir::kTorchOrtDomain, "WinogradConvolution"}, inputs, {found.y->type},
             {{"pads", found.pads}})
        .outputs[0];
  }

  void rewrite_gradients(ops::Writer& write, const Convolution& found) {
    if (found.dx != nullptr) {
      Shape pads;
      for (const Dim& pad : found.pads) pads.push_back(2 - pad.constant());
      const Node& made =
          write.add({ir::kTorchOrtDomain, "WinogradConvolution"}, {found.gradient, found.weight},
                    {found.dx->type}, {{"pads", pads}, {"turned", Dim(1)}});
      replace(*found.dx, *made.outputs[0]);
    }
    if (found.dweight == nullptr) return;
    Node* const copy = find_copy(*found.dweight);
    Value& dweight = copy != nullptr ? *copy->outputs[0] : *found.dweight;
    const Node& made = write.add({ir::kTorchOrtDomain, "WinogradWeightGrad"},
                                 {found.gradient, found.x}, {dweight.type},
                                 {{"dilations", found.dilations},
                                  {"groups", found.groups},
                                  {"pads", found.pads},
                                  {"strides", found.strides}});
    replace(dweight, *made.outputs[0]);
    if (copy != nullptr) ir::erase(graph_, *copy);
    if (found.dbias != nullptr) replace(*found.dbias, *sum_pixels(write, *found.gradient));
  }

  // The node that copies a gradient to rows, if nothing else reads it: the kernel writes either
  // layout.
  static Node* find_copy(const Value& dweight) {
    Node* reader = dweight.uses.size() == 1 ? dweight.uses[0].node : nullptr;
    const bool is_copy = reader != nullptr && ir::is(reader, "Identity") &&
                         reader->outputs[0]->type.is_known() && !reader->outputs[0]->type.strides;
    return is_copy ? reader : nullptr;
  }

  void replace(Value& old, Value& made) { ir::replace_uses(old, made, graph_); }

  Graph& graph_;
  const KnownSizes sizes_;
};

}  // namespace

int winograd(Graph& graph, PassContext& context) { return Rewriter(graph).run(context); }

}  // namespace torch_ort::passes
