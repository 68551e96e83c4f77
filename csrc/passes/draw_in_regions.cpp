// Random masks drawn by PyTorch's kernel -> masks computed where they are needed, from one seed for
// each run and the position of each element. The backward half recomputes them, so none is saved
// for backward. Attention draws in its own kernel. The masks follow `torch.manual_seed`, but differ
// from those of eager PyTorch; the option exact_random disables this pass.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// Whether fuse_regions will take the mask into a region. Only such masks are rewritten, because
// nothing but a region or the attention kernel can draw a PhiloxMask.
bool can_draw(const Node& node, const KnownSizes& sizes, const SharedMemory& memory) {
  if (!ir::is(&node, "BernoulliMask", ir::kTorchOrtDomain)) return false;
  const Value* mask = node.outputs.at(0);
  if (!region::takes(mask) || mask->uses.empty()) return false;
  if (!sizes.are_known(*mask) || memory.is_written(mask)) return false;
  const ir::Dim count = ir::numel(*mask->type.shape);
  return !(count == ir::Dim(0)) && !(count == ir::Dim(1));
}

Value& insert_mask(Graph& graph, Node& before, Value& seed, const Node& drawn, int64_t stream) {
  return *ops::Writer(graph, &before)
              .make_ours("PhiloxMask", {&seed}, drawn.outputs[0]->type,
                         {{"keep", ir::float_attr(drawn.attrs, "keep", 0.5)},
                          {"stream", ir::Dim(stream)}});
}

void draw_in_attention(Value& drawn, Value& seed, int64_t stream) {
  const std::vector<ir::Use> uses = drawn.uses;
  for (const ir::Use& use : uses) {
    if (!ir::is(use.node, "Attention", ir::kTorchOrtDomain) &&
        !ir::is(use.node, "AttentionGrad", ir::kTorchOrtDomain)) {
      continue;
    }
    ir::set_input(*use.node, use.index, &seed);
    use.node->attrs["stream"] = ir::Dim(stream);
  }
}

// The readers in the backward half get a mask of their own, which is drawn again in front of the
// first of them.
void draw_again(Graph& graph, const std::unordered_set<const Node*>& backward, Value& seed,
                Node& drawn, int64_t stream) {
  std::vector<ir::Use> readers;
  for (const ir::Use& use : drawn.outputs[0]->uses) {
    if (use.node != nullptr && use.index >= 0 && backward.contains(use.node))
      readers.push_back(use);
  }
  if (readers.empty()) return;
  Node* first = nullptr;
  for (Node& node : graph.nodes) {
    const auto reads = [&node](const ir::Use& use) { return use.node == &node; };
    if (std::any_of(readers.begin(), readers.end(), reads)) {
      first = &node;
      break;
    }
  }
  Value& again = insert_mask(graph, *first, seed, drawn, stream);
  for (const ir::Use& use : readers) ir::set_input(*use.node, use.index, &again);
}

}  // namespace

int draw_in_regions(Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  const KnownSizes sizes(graph);
  const auto backward = backward_nodes(graph);
  Value* seed = nullptr;
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !can_draw(node, sizes, memory)) continue;
    if (!context.may_rewrite()) return rewrites;
    if (seed == nullptr) {
      const ir::Type type{.dtype = ir::DType::kInt64,
                          .shape = ir::Shape{1},
                          .device = node.outputs[0]->type.device};
      seed = ops::Writer(graph, &node).make_ours("RandomSeed", {}, type);
    }
    const int64_t stream = rewrites++;
    draw_in_attention(*node.outputs[0], *seed, stream);
    if (!backward.contains(&node)) draw_again(graph, backward, *seed, node, stream);
    if (!node.outputs[0]->uses.empty()) {
      Value& mask = insert_mask(graph, node, *seed, node, stream);
      ir::replace_uses(*node.outputs[0], mask, graph);
    }
    ir::erase(graph, node);
  }
  return rewrites;
}

}  // namespace torch_ort::passes
