#include "passes/border/border.h"

#include "ops/collective.h"
#include "ops/op.h"
#include "passes/halves.h"

#include <algorithm>

namespace torch_ort::passes {

using ir::Value;

Border::Border(ir::Graph& graph)
    : memory_(graph),
      sizes_(graph),
      backward_(backward_nodes(graph)),
      groups_(region_groups(graph)) {
  for (size_t number = 0; number < groups_.size(); ++number) {
    for (const region::Member& each : groups_[number].nodes) {
      group_of_[each.node] = static_cast<int>(number);
    }
  }
}

int Border::group_of(const ir::Node* node) const {
  const auto found = group_of_.find(node);
  return found == group_of_.end() ? -1 : found->second;
}

bool Border::is_constant(const Value& value) {
  if (value.producer == nullptr) return value.data != nullptr;
  return value.producer->inputs.empty() &&
         (ir::is(value.producer, "Dims", ir::kTorchOrtDomain) ||
          ir::is(value.producer, "SizeRatio", ir::kTorchOrtDomain));
}

bool Border::may_repeat(const ir::Node& node) const {
  return ops::is_pure(node) && ir::bodies(node).empty() && values_allow_repeat(node);
}

bool Border::may_gather_again(const ir::Node& node) const {
  if (!ops::is_gather(node) || !values_allow_repeat(node)) return false;
  const auto& uses = node.outputs[0]->uses;
  if (uses.size() != 1 || uses[0].node == nullptr) return false;
  const ir::Node& reader = *uses[0].node;
  return ops::is_wait(reader) && !is_backward(&reader) && values_allow_repeat(reader);
}

bool Border::values_allow_repeat(const ir::Node& node) const {
  if (node.recompute == "must_save" || node.recompute == "prefer_save") return false;
  const auto is_in_reach = [this](const Value* value) {
    return value == nullptr ||
           (value->type.is_known() && sizes_.are_known(*value) && !memory_.is_written(value));
  };
  return std::all_of(node.outputs.begin(), node.outputs.end(), is_in_reach) &&
         std::all_of(node.inputs.begin(), node.inputs.end(), is_in_reach);
}

}  // namespace torch_ort::passes
