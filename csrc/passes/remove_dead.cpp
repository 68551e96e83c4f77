// Erases pure nodes whose results nobody reads. Keeps the node that binds a symbol, since sizes
// elsewhere may use it.

#include "ir/edit.h"
#include "ops/op.h"
#include "passes/context.h"

#include <algorithm>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

std::vector<std::string> symbols_of(const ir::Value* value) {
  std::vector<std::string> symbols;
  if (value == nullptr || !value->type.shape) return symbols;
  for (const ir::Dim& dim : *value->type.shape) dim.collect_symbols(symbols);
  return symbols;
}

// The nodes that bind symbols: those with a result in whose sizes a symbol appears first, and those
// that name a symbol to bind.
std::unordered_set<const ir::Node*> binders(const ir::Graph& graph) {
  std::unordered_set<std::string> bound(graph.symbol_inputs.begin(), graph.symbol_inputs.end());
  for (const ir::Value* input : graph.inputs) {
    for (std::string& symbol : symbols_of(input)) bound.insert(std::move(symbol));
  }
  std::unordered_set<const ir::Node*> nodes;
  for (const ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (ir::has_attr(node.attrs, "binds_symbol")) nodes.insert(&node);
    for (const ir::Value* output : node.outputs) {
      for (std::string& symbol : symbols_of(output)) {
        if (bound.insert(std::move(symbol)).second) nodes.insert(&node);
      }
    }
  }
  return nodes;
}

bool is_read(const ir::Node& node) {
  return std::any_of(node.outputs.begin(), node.outputs.end(), [](const ir::Value* output) {
    return output != nullptr && !output->uses.empty();
  });
}

}  // namespace

int remove_dead(ir::Graph& graph, PassContext& context) {
  const std::unordered_set<const ir::Node*> kept = binders(graph);
  int rewrites = 0;
  // Readers are erased before the nodes that they read, so one walk backwards is enough.
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (node->is_erased() || is_read(*node)) continue;
    if (!ops::is_pure(*node) || kept.contains(&*node)) continue;
    if (!context.may_rewrite()) return rewrites;
    ir::erase(graph, *node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
