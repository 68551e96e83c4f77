// What decides in a training graph which results of the forward half may be computed again in the
// backward half, and what keeps them from it.
#pragma once

#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/region_groups.h"

#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes {

class Border {
 public:
  explicit Border(ir::Graph& graph);

  bool is_backward(const ir::Node* node) const { return backward_.contains(node); }
  // The regions that will be made, and the number of the one that a node will be in; -1: in none.
  const std::vector<RegionGroup>& groups() const { return groups_; }
  int group_of(const ir::Node* node) const;
  const SharedMemory& memory() const { return memory_; }

  // Whether the value is known without a tensor: a constant, or made of sizes alone. Both halves
  // may read it.
  static bool is_constant(const ir::Value& value);
  // Whether a second run of the node gives the same, as far as its op and its values decide.
  bool may_repeat(const ir::Node& node) const;
  // Whether a node starts to gather a tensor, and the only reader of that waits for it, so that
  // both may run again together.
  bool may_gather_again(const ir::Node& node) const;

 private:
  // Whether nobody asks to save the results of the node, and its values have known sizes and keep
  // what is in them.
  bool values_allow_repeat(const ir::Node& node) const;

  const SharedMemory memory_;
  const KnownSizes sizes_;
  const std::unordered_set<const ir::Node*> backward_;
  const std::vector<RegionGroup> groups_;
  std::unordered_map<const ir::Node*, int> group_of_;
};

}  // namespace torch_ort::passes
