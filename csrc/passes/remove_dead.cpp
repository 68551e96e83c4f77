// Erases pure nodes whose results nobody reads. Keeps the node that gives a symbol its value, since
// sizes elsewhere may use it.

#include "ir/edit.h"
#include "ops/op.h"
#include "passes/context.h"
#include "passes/data_sizes.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

bool is_read(const ir::Node& node) {
  return std::any_of(node.outputs.begin(), node.outputs.end(), [](const ir::Value* output) {
    return output != nullptr && !output->uses.empty();
  });
}

}  // namespace

int remove_dead(ir::Graph& graph, PassContext& context) {
  const DataSizes sizes(graph);
  int rewrites = 0;
  // Readers are erased before the nodes that they read, so one walk backwards is enough.
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (node->is_erased() || is_read(*node)) continue;
    if (!ops::is_pure(*node) || sizes.is_giver(*node)) continue;
    if (!context.may_rewrite()) return rewrites;
    ir::erase(graph, *node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
