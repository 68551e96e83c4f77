#include "passes/halves.h"

namespace torch_ort::passes {

std::unordered_set<const ir::Node*> backward_nodes(const ir::Graph& graph) {
  std::unordered_set<const ir::Node*> nodes;
  bool is_backward = false;
  for (const ir::Node& node : graph.nodes) {
    if (is_backward) nodes.insert(&node);
    if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) is_backward = true;
  }
  return nodes;
}

}  // namespace torch_ort::passes
