// Vocabulary for finding attention: shapes of heads, and what single nodes compute.
#pragma once

#include "ir/graph.h"

#include <optional>
#include <vector>

namespace torch_ort::passes::attention {

using Nodes = std::vector<ir::Node*>;

// The shape of a value that has a known one.
inline const ir::Shape& shape_of(const ir::Value& value) { return *value.type.shape; }
// The dim `i` counted from the back; 1 is the last.
inline const ir::Dim& last(const ir::Shape& shape, size_t i) { return shape[shape.size() - i]; }
// All but the last two dims.
ir::Shape leading(const ir::Shape& shape);
// The shape with its last two dims replaced.
ir::Shape with_matrix(const ir::Shape& shape, const ir::Dim& rows, const ir::Dim& columns);

// Whether the result has the elements of the first input in their order.
bool keeps_elements(const ir::Node& node);

// The permutation that exchanges the last two dims.
ir::Shape swapped_order(size_t rank);
bool swaps_last_dims(const ir::Node* node);

// A product of a tensor and a constant number.
struct Multiple {
  ir::Value* of;
  double factor;
};
std::optional<Multiple> multiple(const ir::Node& node);

// A tensor in which a number replaces all elements where a condition holds.
struct Filled {
  ir::Value *of, *condition;
  double number;
  bool where_true;  // otherwise where the condition is false
};
std::optional<Filled> filled(const ir::Node& node);

// Whether two numbers are equal but for rounding: programs compute their constants in several ways.
bool are_close(double a, double b);

// Whether a mask for scores of this shape is 0 where the key is at the query's place or before it,
// and -inf elsewhere.
bool is_causal_mask(const ir::Value& mask, const ir::Shape& scores);

}  // namespace torch_ort::passes::attention
