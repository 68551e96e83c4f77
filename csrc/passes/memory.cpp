#include "passes/memory.h"

#include "ops/aten_names.h"
#include "ops/op.h"
#include "passes/arguments.h"
#include "passes/halves.h"

#include <algorithm>

namespace torch_ort::passes {

SharedMemory::SharedMemory(const ir::Graph& graph) {
  for (const ir::Value* output : graph.outputs) leaving_.insert(root(output));
  for (const ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    const bool is_yield = is_border(&node);
    has_yield_ = has_yield_ || is_yield;
    // Of other operators it is not known which of their operands they write to.
    const size_t num_written = !ops::may_write(node)               ? 0
                               : kind_of(node) == ops::aten::kCopy ? 1
                                                                   : node.inputs.size();
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] == nullptr) continue;
      if (is_yield) leaving_.insert(root(node.inputs[i]));
      if (i < num_written) written_.insert(root(node.inputs[i]));
    }
  }
  // Values that a subgraph refers to by name are not among the inputs of its node.
  for (const ir::Value& value : graph.values) {
    const bool is_written_inside = std::any_of(
        value.uses.begin(), value.uses.end(),
        [](const ir::Use& use) { return use.index == ir::kCaptured && ops::may_write(*use.node); });
    if (is_written_inside) written_.insert(root(&value));
  }
}

const ir::Value* SharedMemory::root(const ir::Value* value) {
  while (value->producer != nullptr && ops::is_view(*value->producer) &&
         !value->producer->inputs.empty() && value->producer->inputs[0] != nullptr) {
    value = value->producer->inputs[0];
  }
  return value;
}

bool SharedMemory::is_callers(const ir::Value* value) const {
  const ir::Value* base = root(value);
  if (base->producer == nullptr) return base->data == nullptr;
  return is_border(base->producer);
}

}  // namespace torch_ort::passes
