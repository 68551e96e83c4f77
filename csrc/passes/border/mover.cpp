#include "passes/border/mover.h"

#include "ir/edit.h"
#include "ops/writer.h"
#include "passes/halves.h"

#include <utility>

namespace torch_ort::passes {

using ir::Node;
using ir::Value;

bool asks_recompute(const Node& node) {
  return node.recompute == "must_recompute" || node.recompute == "prefer_recompute";
}

Node& Mover::copy(const Node& node, Node& before) {
  std::vector<Value*> inputs;
  for (Value* input : node.inputs) inputs.push_back(current(input));
  Node& made = ops::Writer(graph_, &before).again(node, std::move(inputs));
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] != nullptr) replace(*node.outputs[i], *made.outputs[i]);
  }
  return made;
}

Value* Mover::current(Value* value) const {
  const auto found = stands_for_.find(value);
  return found == stands_for_.end() ? value : found->second;
}

void Mover::redirect(const ir::Use& use) const {
  Value* input = use.node->inputs[use.index];
  if (Value* other = current(input); other != input) ir::set_input(*use.node, use.index, other);
}

void Mover::redirect_backward_half() const {
  for (Node* node : backward_half(graph_)) {
    for (int i = 0; i < static_cast<int>(node->inputs.size()); ++i) redirect({node, i});
  }
}

}  // namespace torch_ort::passes
