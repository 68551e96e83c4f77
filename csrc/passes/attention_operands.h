// What the factors of written-out attention are made from: views, copies and multiples that the
// kernel needs none of.
#pragma once

#include "passes/attention_match.h"
#include "passes/memory.h"

#include <unordered_set>

namespace torch_ort::passes::attention {

class OperandSteps {
 public:
  OperandSteps(const SharedMemory& memory, const std::unordered_set<const ir::Node*>& backward)
      : memory_(memory), backward_(backward) {}

  // Steps back over views, copies and multiples of an operand, with its gradient: those of heads
  // (of the shape `heads`) that the kernel can read as they are. `scale` takes the multiples;
  // nullptr: none are stepped over. `gone` gets the nodes that the gradient has passed.
  void step_back(Operand& operand, const ir::Shape& heads, double* scale, Nodes& gone) const;

 private:
  template <typename Predicate>
  bool follow_gradient(Operand& operand, Nodes& gone, Predicate is_step) const;
  bool may_read_instead(const ir::Value& source, const ir::Value& made) const;

  const SharedMemory& memory_;
  const std::unordered_set<const ir::Node*>& backward_;
};

}  // namespace torch_ort::passes::attention
