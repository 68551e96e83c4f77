// Vocabulary for finding losses of linear layers: what happens to rows of logits and to their
// gradients.
#pragma once

#include "ir/graph.h"
#include "ops/linear_loss.h"
#include "passes/attention_words.h"

#include <cstdint>
#include <optional>

namespace torch_ort::passes::losses {

// Whether the node is the negative log likelihood of rows of log-probabilities against labels, an
// ATen or an ONNX op.
bool is_loss(const ir::Node& node);
bool has_count(const ir::Node& loss);
struct LossCall {
  ir::Value *logarithms, *labels, *class_weight;
  ops::Reduction reduction;
  int64_t ignore_index;
};
LossCall decode_loss(const ir::Node& loss);

// Whether the node casts bfloat16 or float16 to float32 or back. Regions do not round in between
// either.
bool is_cast(const ir::Node& node);
// Whether the rows of its input come out unchanged.
bool keeps_rows(const ir::Node& node);

// How many elements a slice cuts off at the two ends of an axis that is not the last.
struct Cut {
  size_t axis;
  int64_t before, after;
};
std::optional<Cut> cut_of(const ir::Node& node);
// Whether the node is the gradient of `slice`, with zeros for what was cut off.
bool is_gradient_of_cut(const ir::Node& node, const ir::Node& slice);

// A product of a tensor of any dtype and a constant number.
std::optional<attention::Multiple> scaled(const ir::Node& node);
// Which input of a node between the product and the loss has the logits.
size_t slot_of_logits(const ir::Node& node);

bool lies_by_rows(const ir::Value& value);
// The value before it was viewed as rows of a matrix.
const ir::Value* rows_of(const ir::Value* value);
// Whether one matrix is the transpose of the other.
bool is_turned(const ir::Value* value, const ir::Value* other);
// Whether a value is the class weights broadcast beside rows of logits.
bool is_row_of(const ir::Value* value, const ir::Value* weights);

}  // namespace torch_ort::passes::losses
