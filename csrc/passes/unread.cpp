#include "passes/unread.h"

#include "ir/edit.h"

#include <algorithm>

namespace torch_ort::passes {

bool is_read(const ir::Node& node, size_t output) {
  return output < node.outputs.size() && node.outputs[output] != nullptr &&
         !node.outputs[output]->uses.empty();
}

void erase_unread(ir::Graph& graph, const std::vector<ir::Node*>& nodes) {
  const auto is_unread = [](const ir::Node* node) {
    return std::all_of(node->outputs.begin(), node->outputs.end(), [](const ir::Value* value) {
      return value == nullptr || value->uses.empty();
    });
  };
  for (bool found = true; found;) {
    found = false;
    for (ir::Node* node : nodes) {
      if (node->is_erased() || !is_unread(node)) continue;
      ir::erase(graph, *node);
      found = true;
    }
  }
}

}  // namespace torch_ort::passes
