#include "passes/attention_words.h"

#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/known_sizes.h"

#include <cmath>
#include <limits>

namespace torch_ort::passes::attention {

using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Value;

Shape with_matrix(const Shape& shape, const Dim& rows, const Dim& columns) {
  Shape result(shape.begin(), shape.end() - 2);
  result.insert(result.end(), {rows, columns});
  return result;
}

Shape leading(const Shape& shape) { return Shape(shape.begin(), shape.end() - 2); }

bool keeps_elements(const Node& node) {
  if (!node.op.domain.empty() || node.inputs.empty() || !is_fusible_float(node.inputs[0]))
    return false;
  if (!is_fusible_float(node.outputs.at(0))) return false;
  if (ir::is(&node, "Expand")) return shape_of(*node.inputs[0]) == shape_of(*node.outputs[0]);
  return ops::work_of(node).keeps_elements;
}

Shape swapped_order(size_t rank) {
  Shape order;
  for (size_t i = 0; i < rank; ++i) order.push_back(static_cast<int64_t>(i));
  std::swap(order[rank - 2], order[rank - 1]);
  return order;
}

bool swaps_last_dims(const Node* node) {
  if (!ir::is(node, "Transpose")) return false;
  const Shape order = ir::ints_attr(node->attrs, "perm", {});
  return order.size() >= 2 && order == swapped_order(order.size());
}

std::optional<Multiple> multiple(const Node& node) {
  const bool is_quotient = ir::is(&node, "Div");
  if (!is_quotient && !ir::is(&node, "Mul")) return std::nullopt;
  for (size_t side : {0, 1}) {
    Value *rest = node.inputs[side], *number = node.inputs[1 - side];
    if (is_quotient && side == 1) break;
    const std::optional<double> factor = ops::known_double(number);
    if (!factor || *factor == 0 || !is_fusible_float(rest) || !is_fusible_float(node.outputs[0]))
      continue;
    if (!(shape_of(*rest) == shape_of(*node.outputs[0]))) continue;
    return Multiple{rest, is_quotient ? 1 / *factor : *factor};
  }
  return std::nullopt;
}

std::optional<Filled> filled(const Node& node) {
  if (!ir::is(&node, "Where")) return std::nullopt;
  for (bool where_true : {true, false}) {
    Value *number = node.inputs[where_true ? 1 : 2], *rest = node.inputs[where_true ? 2 : 1];
    const std::optional<double> known = ops::known_double(number);
    if (!known || !is_fusible_float(rest) || !is_fusible_float(node.outputs[0])) continue;
    if (!(shape_of(*rest) == shape_of(*node.outputs[0]))) continue;
    return Filled{rest, node.inputs[0], *known, where_true};
  }
  return std::nullopt;
}

bool are_close(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

bool is_causal_mask(const Value& mask, const Shape& scores) {
  const Shape& shape = shape_of(mask);
  const bool is_whole =
      shape.size() >= 2 && last(shape, 1) == last(scores, 1) && last(shape, 2) == last(scores, 2);
  if (!is_whole || mask.producer == nullptr) return false;
  const Node& where = *mask.producer;
  if (!ir::is(&where, "Where") || ops::known_double(where.inputs[1]) != 0.0 ||
      ops::known_double(where.inputs[2]) != -std::numeric_limits<double>::infinity()) {
    return false;
  }
  const Node* triangle = where.inputs[0]->producer;
  if (!ir::is(triangle, "Trilu") || ir::int_attr(triangle->attrs, "upper", 1) != 0) return false;
  if (ops::has_input(*triangle, 1) && ops::known_double(triangle->inputs[1]) != 0.0) return false;
  const Node* ones = triangle->inputs[0]->producer;
  if (!ir::is(ones, "ConstantOfShape")) return false;
  const auto element = ones->attrs.find("value");
  if (element == ones->attrs.end()) return false;
  const auto* data = std::get_if<std::shared_ptr<const ir::TensorData>>(&element->second);
  return data != nullptr && (*data)->dtype == DType::kBool && (*data)->bytes[0] != std::byte(0);
}

}  // namespace torch_ort::passes::attention
