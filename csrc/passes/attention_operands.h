// Traces the factors of attention back over views, copies and scalings that the kernel does not
// need.
#pragma once

#include "passes/attention_match.h"
#include "passes/memory.h"

#include <unordered_set>

namespace torch_ort::passes::attention {

class OperandSteps {
 public:
  OperandSteps(const SharedMemory& memory, const std::unordered_set<const ir::Node*>& backward)
      : memory_(memory), backward_(backward) {}

  // Replaces an operand, and its gradient, by the value before views, copies and scalings, as long
  // as the kernel can read that value as heads of the shape `heads`. `scale` is multiplied by the
  // factors that were stepped over; with nullptr scalings are not stepped over. The nodes that the
  // gradient passed on this way are appended to `gone`.
  void step_back(Operand& operand, const ir::Shape& heads, double* scale, Nodes& gone) const;

 private:
  template <typename Predicate>
  bool follow_gradient(Operand& operand, Nodes& gone, Predicate is_step) const;
  bool may_read_instead(const ir::Value& source, const ir::Value& made) const;

  const SharedMemory& memory_;
  const std::unordered_set<const ir::Node*>& backward_;
};

}  // namespace torch_ort::passes::attention
