// A view that both halves read -> a second view in the backward half, made from the same base. Then
// only the base crosses the border. It is a tensor that autograd saves itself, so that its version
// counter notices every in-place edit, or it is engine memory.

#include "ir/edit.h"
#include "ops/op.h"
#include "passes/border/mover.h"
#include "passes/context.h"
#include "passes/halves.h"

#include <algorithm>
#include <unordered_set>

namespace torch_ort::passes {

using ir::Node;
using ir::Value;

int replay_views(ir::Graph& graph, PassContext& /*context*/) {
  const std::vector<Node*> backward = backward_half(graph);
  if (backward.empty()) return 0;
  std::vector<Node*> views;  // of the forward half
  for (Node& node : graph.nodes) {
    if (is_border(&node)) break;
    if (!node.is_erased() && !node.inputs.empty() && ops::is_view(node)) views.push_back(&node);
  }
  const std::unordered_set<const Node*> is_view(views.begin(), views.end());

  std::unordered_set<const Node*> needed;
  const auto need = [&](const Value* value) {
    if (value != nullptr && is_view.contains(value->producer)) needed.insert(value->producer);
  };
  for (const Node* node : backward) std::for_each(node->inputs.begin(), node->inputs.end(), need);
  std::for_each(graph.outputs.begin(), graph.outputs.end(), need);
  for (auto view = views.rbegin(); view != views.rend(); ++view) {
    if (needed.contains(*view)) need((*view)->inputs[0]);
  }

  Mover mover(graph);
  for (const Node* view : views) {
    if (needed.contains(view)) mover.copy(*view, *backward.front());
  }
  mover.redirect_backward_half();
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    Value* replayed = mover.current(graph.outputs[i]);
    if (replayed == graph.outputs[i]) continue;
    const std::string name = graph.outputs[i]->name;
    ir::set_output(graph, static_cast<int>(i), *replayed);
    ir::take_name(graph, *replayed, name);
  }
  return static_cast<int>(needed.size());
}

}  // namespace torch_ort::passes
