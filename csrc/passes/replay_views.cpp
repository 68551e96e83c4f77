// A view that both halves read -> a second view in the backward half, made from the same base. Then
// only the base crosses the border. It is a tensor that autograd saves itself, so that its version
// counter notices every in-place edit, or it is engine memory.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/context.h"

#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// The views of the forward half, in order.
std::vector<Node*> forward_views(Graph& graph, const Node& yield) {
  std::vector<Node*> views;
  for (Node& node : graph.nodes) {
    if (&node == &yield) break;
    if (!node.is_erased() && !node.inputs.empty() && ops::is_view(node)) views.push_back(&node);
  }
  return views;
}

Node* find_yield(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) return &node;
  }
  return nullptr;
}

}  // namespace

int replay_views(Graph& graph, PassContext& /*context*/) {
  Node* yield = find_yield(graph);
  if (yield == nullptr) return 0;
  const std::vector<Node*> views = forward_views(graph, *yield);
  std::unordered_set<const Node*> is_view(views.begin(), views.end());

  std::unordered_set<const Node*> needed;
  std::vector<Node*> readers;
  Node* first_backward = nullptr;
  bool is_backward = false;
  for (Node& node : graph.nodes) {
    if (is_backward && !node.is_erased()) {
      if (first_backward == nullptr) first_backward = &node;
      readers.push_back(&node);
      for (const Value* value : node.inputs) {
        if (value != nullptr && is_view.contains(value->producer)) needed.insert(value->producer);
      }
    }
    if (&node == yield) is_backward = true;
  }
  for (const Value* output : graph.outputs) {
    if (is_view.contains(output->producer)) needed.insert(output->producer);
  }
  if (needed.empty() || first_backward == nullptr) return 0;
  for (auto view = views.rbegin(); view != views.rend(); ++view) {
    const Value* viewed = (*view)->inputs[0];
    if (needed.contains(*view) && viewed != nullptr && is_view.contains(viewed->producer)) {
      needed.insert(viewed->producer);
    }
  }

  ops::Writer write(graph, first_backward);
  std::unordered_map<const Value*, Value*> replayed;
  for (Node* view : views) {
    if (!needed.contains(view)) continue;
    std::vector<Value*> inputs = view->inputs;
    for (Value*& input : inputs) {
      if (auto found = replayed.find(input); found != replayed.end()) input = found->second;
    }
    const Node& again = write.again(*view, std::move(inputs));
    for (size_t i = 0; i < view->outputs.size(); ++i) {
      if (view->outputs[i] != nullptr) replayed[view->outputs[i]] = again.outputs[i];
    }
  }
  for (Node* reader : readers) {
    for (size_t i = 0; i < reader->inputs.size(); ++i) {
      auto found = replayed.find(reader->inputs[i]);
      if (found != replayed.end()) ir::set_input(*reader, static_cast<int>(i), found->second);
    }
  }
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    auto found = replayed.find(graph.outputs[i]);
    if (found == replayed.end()) continue;
    const std::string name = graph.outputs[i]->name;
    ir::set_output(graph, static_cast<int>(i), *found->second);
    ir::take_name(graph, *found->second, name);
  }
  return static_cast<int>(needed.size());
}

}  // namespace torch_ort::passes
