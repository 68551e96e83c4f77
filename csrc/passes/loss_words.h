// The words in which losses of linear layers are spoken of: what happens to rows of logits, and to
// their gradients.
#pragma once

#include "ir/graph.h"
#include "ops/linear_loss.h"
#include "passes/attention_words.h"

#include <cstdint>
#include <optional>

namespace torch_ort::passes::losses {

// The losses of rows of logarithms against labels, of PyTorch or, where nobody reads how many rows
// count, of ONNX.
bool is_loss(const ir::Node& node);
bool has_count(const ir::Node& loss);
struct LossCall {
  ir::Value *logarithms, *labels, *class_weight;
  ops::Reduction reduction;
  int64_t ignore_index;
};
LossCall decode_loss(const ir::Node& loss);

// A short float in float32 or the other way: regions do not round in between either.
bool is_cast(const ir::Node& node);
// Whether rows go through it as they are.
bool keeps_rows(const ir::Node& node);

// What a slice cuts off an axis that is not the last one.
struct Cut {
  size_t axis;
  int64_t before, after;
};
std::optional<Cut> cut_of(const ir::Node& node);
// The gradient of what `slice` cuts: zeros where nothing has come through.
bool is_gradient_of_cut(const ir::Node& node, const ir::Node& slice);

// A product with a number that is known, of any type.
std::optional<attention::Multiple> scaled(const ir::Node& node);
// Where a node on the way from the product to the loss reads the logits.
size_t slot_of_logits(const ir::Node& node);

bool lies_by_rows(const ir::Value& value);
// What the rows of a matrix were before they were viewed as such.
const ir::Value* rows_of(const ir::Value* value);
// Whether one matrix is the other one turned over.
bool is_turned(const ir::Value* value, const ir::Value* other);
// Weights of classes as they stand beside rows of logits.
bool is_row_of(const ir::Value* value, const ir::Value* weights);

}  // namespace torch_ort::passes::losses
