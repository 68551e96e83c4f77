// Scaled dot-product attention. Backward reads the logarithms of the row sums, which ONNX does not
// give: training keeps the call as it is. So do the kernels of other devices.

#include "convert/families.h"
#include "convert/rows.h"

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::Shape;
using ir::Value;
using Values = std::vector<Value*>;

// Whether all three have the form (batch, heads, length, features), with equal heads and features.
bool are_heads(const Value* query, const Value* key, const Value* value) {
  for (const Value* x : {query, key, value}) {
    if (x == nullptr || !x->type.shape || x->type.shape->size() != 4) return false;
    if (!is_float(x->type.dtype) || x->type.dtype != query->type.dtype) return false;
    const Shape &shape = *x->type.shape, &first = *query->type.shape;
    if (!(shape[1] == first[1]) || !(shape[3] == first[3])) return false;
  }
  return true;
}

// Whether the mask is one that is added to scores, and covers all keys.
bool is_mask(const Value* mask, const Value* query, const Value* key) {
  if (!mask->type.shape || mask->type.dtype != query->type.dtype) return false;
  const Shape& shape = *mask->type.shape;
  return (shape.size() == 2 || shape.size() == 4) && shape.back() == (*key->type.shape)[2];
}

Values flash_attention_for_cpu(Builder& builder, const AtenCall& call) {
  Value *query = tensor(call.arg("query")), *key = tensor(call.arg("key"));
  Value *value = tensor(call.arg("value")), *mask = tensor(call.arg("attn_mask"));
  const ops::Arg &dropout = call.arg("dropout_p"), &scale = call.arg("scale");
  if (call.used[1] || !are_heads(query, key, value)) return {};
  if (!is_number(dropout) || number(dropout) != 0.0) return {};
  if (!scale.is_none() && !is_number(scale)) return {};
  const bool is_causal = boolean(call.arg("is_causal"));
  if (mask != nullptr && (is_causal || !is_mask(mask, query, key))) return {};
  // For different lengths, opsets differ in the corner at which the causal triangle begins.
  if (is_causal && !((*query->type.shape)[2] == (*key->type.shape)[2])) return {};

  Values inputs = {query, key, value};
  if (mask != nullptr) inputs.push_back(mask);
  ir::Attrs attrs;
  if (is_causal) attrs["is_causal"] = Dim(1);
  if (!scale.is_none()) attrs["scale"] = number(scale);
  Values outputs = standard(builder, "Attention", inputs, {call.types[0]}, std::move(attrs));
  if (!outputs.empty()) outputs.push_back(nullptr);
  return outputs;
}

}  // namespace

void add_attention(Table& table) {
  table.add("aten::_scaled_dot_product_flash_attention_for_cpu", flash_attention_for_cpu);
}

}  // namespace torch_ort::convert
