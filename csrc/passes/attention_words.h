// The words in which written-out attention is spoken of: shapes of heads, and what single nodes do.
#pragma once

#include "ir/graph.h"

#include <optional>
#include <vector>

namespace torch_ort::passes::attention {

using Nodes = std::vector<ir::Node*>;

// Of a value whose shape is known.
inline const ir::Shape& shape_of(const ir::Value& value) { return *value.type.shape; }
// A dim that is counted from the back.
inline const ir::Dim& last(const ir::Shape& shape, size_t i) { return shape[shape.size() - i]; }
// All but the last two dims.
ir::Shape leading(const ir::Shape& shape);
// The shape with other dims in the place of the last two.
ir::Shape with_matrix(const ir::Shape& shape, const ir::Dim& rows, const ir::Dim& columns);

// Whether the result has the elements of the first input, in their order.
bool keeps_elements(const ir::Node& node);

// The order of dims in which the last two have changed places.
ir::Shape swapped_order(size_t rank);
bool swaps_last_dims(const ir::Node* node);

// A product with a number that is known.
struct Multiple {
  ir::Value* of;
  double factor;
};
std::optional<Multiple> multiple(const ir::Node& node);

// A number for all elements where a condition holds.
struct Filled {
  ir::Value *of, *condition;
  double number;
  bool where_true;  // else where the condition is false
};
std::optional<Filled> filled(const ir::Node& node);

// The ratio of a Dropout that draws, if it is known.
std::optional<double> dropout_ratio(const ir::Node& node);

// Numbers of a program come from roundings of their own.
bool are_close(double a, double b);

// 0 where a key stands at the query's place or before it, else -inf, for scores of that shape.
bool is_causal_mask(const ir::Value& mask, const ir::Shape& scores);

}  // namespace torch_ort::passes::attention
