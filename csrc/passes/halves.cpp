#include "passes/halves.h"

namespace torch_ort::passes {

bool is_border(const ir::Node* node) { return ir::is(node, "YieldOp", ir::kMicrosoftDomain); }

std::unordered_set<const ir::Node*> backward_nodes(const ir::Graph& graph) {
  std::unordered_set<const ir::Node*> nodes;
  bool is_backward = false;
  for (const ir::Node& node : graph.nodes) {
    if (is_backward) nodes.insert(&node);
    is_backward = is_backward || is_border(&node);
  }
  return nodes;
}

std::vector<ir::Node*> backward_half(ir::Graph& graph) {
  std::vector<ir::Node*> nodes;
  bool is_backward = false;
  for (ir::Node& node : graph.nodes) {
    if (is_backward && !node.is_erased()) nodes.push_back(&node);
    is_backward = is_backward || is_border(&node);
  }
  return nodes;
}

bool are_together(const std::unordered_set<const ir::Node*>& backward, const ir::Node& a,
                  const ir::Node& b) {
  return backward.contains(&a) == backward.contains(&b) && a.recompute == b.recompute &&
         a.checkpoint == b.checkpoint;
}

}  // namespace torch_ort::passes
