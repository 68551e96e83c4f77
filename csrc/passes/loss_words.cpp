#include "passes/loss_words.h"

#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/known_sizes.h"

#include <limits>
#include <string>

namespace torch_ort::passes::losses {

namespace {

using attention::keeps_elements;
using attention::shape_of;
using attention::swaps_last_dims;
using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Value;

constexpr int64_t kNoLabel = std::numeric_limits<int64_t>::min();

bool is_last_kept(const Node& node) {
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  return !from.empty() && !to.empty() && from.back() == to.back();
}

// The matrix without pairs of transposes that undo each other.
const Value* matrix_of(const Value* value) {
  while (swaps_last_dims(value->producer) &&
         swaps_last_dims(value->producer->inputs[0]->producer)) {
    value = value->producer->inputs[0]->producer->inputs[0];
  }
  return value;
}

}  // namespace

bool is_loss(const Node& node) {
  if (ir::is(&node, "NegativeLogLikelihoodLoss")) return true;
  // The label that is ignored may be a size.
  return ops::key_of(node) == ops::aten::kNllLoss && is_constant(ops::decode_aten(node).args.at(4));
}

bool has_count(const Node& loss) { return loss.outputs.size() > 1; }

LossCall decode_loss(const Node& loss) {
  if (ir::is(&loss, "NegativeLogLikelihoodLoss")) {
    const std::string reduction = ir::string_attr(loss.attrs, "reduction", "mean");
    return {.logarithms = loss.inputs[0],
            .labels = loss.inputs[1],
            .class_weight = ops::has_input(loss, 2) ? loss.inputs[2] : nullptr,
            .reduction = reduction == "mean"  ? ops::Reduction::kMean
                         : reduction == "sum" ? ops::Reduction::kSum
                                              : ops::Reduction::kNone,
            // No class has this label, so no row is ignored.
            .ignore_index = ir::int_attr(loss.attrs, "ignore_index", kNoLabel)};
  }
  const ops::Call call = ops::decode_aten(loss);
  return {.logarithms = tensor(call.args.at(0)),
          .labels = tensor(call.args.at(1)),
          .class_weight = tensor(call.args.at(2)),
          // Numbered as in PyTorch.
          .reduction = static_cast<ops::Reduction>(integer(call.args.at(3))),
          .ignore_index = integer(call.args.at(4))};
}

bool is_cast(const Node& node) {
  if (!ir::is(&node, "Cast") || !is_fusible_float(node.inputs[0]) ||
      !is_fusible_float(node.outputs[0]))
    return false;
  const DType from = node.inputs[0]->type.dtype, to = node.outputs[0]->type.dtype;
  return (ir::is_short_float(from) || ir::is_short_float(to)) && from != DType::kDouble &&
         to != DType::kDouble;
}

bool keeps_rows(const Node& node) {
  return is_cast(node) || (keeps_elements(node) && is_last_kept(node));
}

std::optional<Cut> cut_of(const Node& node) {
  if (!ir::is(&node, "Slice") || !is_fusible_float(node.inputs[0]) ||
      !is_fusible_float(node.outputs[0])) {
    return std::nullopt;
  }
  Dim numbers[] = {0, 0, 0, 1};  // start, end, axis, step
  for (size_t slot = 1; slot <= 4; ++slot) {
    if (!ops::has_input(node, slot)) continue;
    if (!ops::has_known_ints(node.inputs[slot])) return std::nullopt;
    const Shape given = ops::known_ints(node.inputs[slot]);
    if (given.size() != 1) return std::nullopt;
    numbers[slot - 1] = given[0];
  }
  const auto& [start, end, axis, step] = numbers;
  if (!start.is_constant() || !axis.is_constant() || !(step == Dim(1))) return std::nullopt;
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  const auto at =
      static_cast<size_t>(ops::wrap_axis(node, axis.constant(), static_cast<int64_t>(from.size())));
  if (at + 1 == from.size()) return std::nullopt;
  const Dim before = start.constant() < 0 ? ops::plus(from[at], start) : start;
  const Dim after = ops::minus(ops::minus(from[at], to[at]), before);
  if (!before.is_constant() || !after.is_constant()) return std::nullopt;
  if (before.constant() < 0 || after.constant() < 0) return std::nullopt;
  return Cut{at, before.constant(), after.constant()};
}

bool is_gradient_of_cut(const Node& node, const Node& slice) {
  const std::optional<Cut> cut = cut_of(slice);
  if (!cut || ops::key_of(node) != ops::aten::kSliceBackward) return false;
  const ops::Call call = ops::decode_aten(node);
  const auto number = [&](size_t i) { return std::get_if<Dim>(&call.args.at(i).value); };
  const Dim *axis = number(2), *start = number(3), *step = number(5);
  if (axis == nullptr || start == nullptr || step == nullptr) return false;
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  if (!(from == shape_of(*slice.outputs[0])) || !(to == shape_of(*slice.inputs[0]))) return false;
  const int64_t at = ops::wrap_axis(node, axis->constant(), static_cast<int64_t>(to.size()));
  const Dim before = start->is_constant() && start->constant() < 0
                         ? ops::plus(to[static_cast<size_t>(at)], *start)
                         : *start;
  return at == static_cast<int64_t>(cut->axis) && before == Dim(cut->before) && *step == Dim(1);
}

std::optional<attention::Multiple> scaled(const Node& node) {
  if (node.op.domain != ir::kAtenDomain) return attention::multiple(node);
  const std::string key = ops::key_of(node);
  if ((key != ops::aten::kMul && key != ops::aten::kDiv) || node.inputs.size() != 1) {
    return std::nullopt;
  }
  const ops::Call call = ops::decode_aten(node);
  const auto* factor = call.args.size() == 2 ? std::get_if<double>(&call.args[1].value) : nullptr;
  if (factor == nullptr || *factor == 0 || !is_fusible_float(node.inputs[0]) ||
      !is_fusible_float(node.outputs[0])) {
    return std::nullopt;
  }
  return attention::Multiple{node.inputs[0], key == ops::aten::kDiv ? 1 / *factor : *factor};
}

size_t slot_of_logits(const Node& node) {
  return ir::is(&node, "Mul") && ops::known_double(node.inputs[0]) ? 1 : 0;
}

bool lies_by_rows(const Value& value) {
  return !value.type.strides || *value.type.strides == ir::contiguous_strides(shape_of(value));
}

const Value* rows_of(const Value* value) {
  while (value->producer != nullptr && keeps_elements(*value->producer) &&
         is_last_kept(*value->producer)) {
    value = value->producer->inputs[0];
  }
  return value;
}

bool is_turned(const Value* value, const Value* other) {
  const auto turns = [](const Value* made, const Value* from) {
    return swaps_last_dims(made->producer) && matrix_of(made->producer->inputs[0]) == from;
  };
  value = matrix_of(value);
  other = matrix_of(other);
  return turns(value, other) || turns(other, value);
}

bool is_row_of(const Value* value, const Value* weights) {
  const Dim classes = shape_of(*weights)[0];
  if (value->producer != nullptr && keeps_elements(*value->producer)) {
    const Shape& shape = shape_of(*value);
    if (shape.empty() || !(shape.back() == classes) || !(ir::numel(shape) == classes)) return false;
    value = value->producer->inputs[0];
  }
  return value == weights;
}

}  // namespace torch_ort::passes::losses
