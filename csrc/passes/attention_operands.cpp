#include "passes/attention_operands.h"

#include "passes/layouts.h"

namespace torch_ort::passes::attention {

using ir::Node;
using ir::Shape;
using ir::Value;

// Follows the gradient of an operand by one step, through its only reader. Does nothing where no
// gradient is asked for.
template <typename Predicate>
bool OperandSteps::follow_gradient(Operand& operand, Nodes& gone, Predicate is_step) const {
  if (operand.gradient == nullptr) return true;
  if (operand.gradient->uses.size() != 1) return false;
  const ir::Use& use = operand.gradient->uses.front();
  if (use.node == nullptr || use.index < 0 || !backward_.contains(use.node)) return false;
  if (!is_step(*use.node) || !is_fusible_float(use.node->outputs[0])) return false;
  const Value& next = *use.node->outputs[0];
  if (next.type.strides && !takes_any_layout(next)) return false;
  gone.push_back(use.node);
  operand.gradient = use.node->outputs[0];
  return true;
}

// Whether both halves may read `source` instead of `made`, which was computed from it. They may not
// if a later write, by a node or by the caller, could change `source` in between.
bool OperandSteps::may_read_instead(const Value& source, const Value& made) const {
  if (memory_.is_written(&source) || memory_.is_written(&made)) return false;
  return !memory_.leaves(&source) && !(memory_.is_callers(&source) && memory_.has_yield());
}

void OperandSteps::step_back(Operand& operand, const Shape& heads, double* scale,
                             Nodes& gone) const {
  while (operand.value->producer != nullptr) {
    const Node& node = *operand.value->producer;
    const Shape& shape = shape_of(*operand.value);
    const Shape wanted =
        operand.is_transposed ? with_matrix(heads, last(heads, 1), last(heads, 2)) : heads;
    std::optional<Multiple> scaled = multiple(node);
    if (ir::is(&node, "Transpose")) {
      if (!operand.is_transposed || !swaps_last_dims(&node) || !(shape == wanted)) return;
      if (!follow_gradient(operand, gone,
                           [](const Node& next) { return swaps_last_dims(&next); })) {
        return;
      }
      operand.is_transposed = false;
      operand.value = node.inputs[0];
    } else if (scaled && scale != nullptr) {
      if (!may_read_instead(*scaled->of, *operand.value)) return;
      const auto is_same = [&](const Node& next) {
        const auto other = multiple(next);
        return other && are_close(other->factor, scaled->factor);
      };
      if (!follow_gradient(operand, gone, is_same)) return;
      *scale *= scaled->factor;
      operand.value = scaled->of;
    } else if (ir::is(&node, "Reshape")) {
      const Value& from = *node.inputs[0];
      if (shape == wanted || !is_fusible_float(&from) || !(shape_of(from) == wanted)) return;
      const auto is_back = [&](const Node& next) {
        return ir::is(&next, "Reshape") && next.outputs[0]->type.shape == from.type.shape;
      };
      if (!follow_gradient(operand, gone, is_back)) return;
      operand.value = node.inputs[0];
    } else if (ir::is(&node, "Identity") || ir::is(&node, "Expand")) {
      if (!keeps_elements(node)) return;
      if (ir::is(&node, "Identity") && !may_read_instead(*node.inputs[0], *operand.value)) return;
      operand.value = node.inputs[0];
    } else {
      return;
    }
  }
}

}  // namespace torch_ort::passes::attention
