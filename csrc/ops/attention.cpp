// Scaled dot-product attention over heads.

#include "base/error.h"
#include "ops/aten_names.h"
#include "ops/broadcast.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;

// The inputs have rank 4: (batch, heads, length, features).
std::vector<Type> infer_attention(const Node& node) {
  const Type &query = input(node, 0).type, &value = input(node, 2).type;
  std::optional<Shape> shape;
  if (query.shape && value.shape && query.shape->size() == 4 && value.shape->size() == 4) {
    shape = query.shape;
    shape->back() = value.shape->back();
  }
  return {with_shape(query, shape)};
}

void check_form(const Node& node) {
  for (size_t slot : {0, 1, 2}) {
    const Shape& shape = known_shape(node, input(node, slot));
    if (shape.size() == 4) continue;
    throw Unsupported(concat("Attention: input ", slot, ": got rank ", shape.size(), ", want 4"));
  }
  for (size_t slot = 4; slot < node.inputs.size(); ++slot) {
    if (has_input(node, slot))
      throw Unsupported("Attention: past keys and values are not supported");
  }
  for (const char* name : {"softcap", "softmax_precision", "qk_matmul_output_mode",
                           "left_window_size", "right_window_size"}) {
    if (ir::has_attr(node.attrs, name))
      throw Unsupported(concat("Attention: attribute '", name, "' is not supported"));
  }
}

// Whether all sizes are known to be above 0, because the fused kernel divides by them.
bool has_elements(const Node& node) {
  for (size_t slot : {0, 1, 2}) {
    for (const ir::Dim& dim : *input(node, slot).type.shape) {
      if (!dim.is_constant() || dim.constant() == 0) return false;
    }
  }
  return true;
}

// PyTorch's kernels on the CPU require the same numbers of heads and features everywhere.
bool has_fused_kernel(const Node& node) {
  const Type& query = input(node, 0).type;
  if (query.device.kind != "cpu") return false;
  for (size_t slot : {1, 2}) {
    if (!((*input(node, slot).type.shape)[1] == (*query.shape)[1])) return false;
  }
  if (!(query.shape->back() == input(node, 2).type.shape->back())) return false;
  if (!has_input(node, 3)) return true;
  const std::optional<Shape>& mask = node.inputs[3]->type.shape;
  const bool fits = mask && (mask->size() == 2 || mask->size() == 4);
  return fits && ir::int_attr(node.attrs, "is_causal", 0) == 0;
}

// The mask as numbers that a kernel adds to scores: True becomes log(1) = 0, and False log(0) =
// -inf.
Value* added_mask(const Node& node, CallList& calls) {
  if (!has_input(node, 3)) return nullptr;
  Value* mask = node.inputs[3];
  const ir::DType dtype = input(node, 0).type.dtype;
  if (mask->type.dtype == dtype) return mask;
  if (mask->type.dtype != ir::DType::kBool) {
    throw Unsupported(concat("Attention: dtype of the mask: got ", ir::name(mask->type.dtype),
                             ", want bool or ", ir::name(dtype)));
  }
  Type type = with_shape(mask->type, mask->type.shape);
  type.dtype = dtype;
  Value *numbers = calls.temporary(type), *logarithms = calls.temporary(type);
  calls.add("aten::_to_copy", "", {mask, ir::name(dtype), Arg(), Arg(), Arg(), false, Arg()},
            {numbers});
  calls.add("aten::log", "", {numbers}, {logarithms});
  return logarithms;
}

void lower_attention(const Node& node, CallList& calls) {
  check_form(node);
  Value *query = node.inputs[0], *key = node.inputs[1], *value = node.inputs[2];
  Value* mask = added_mask(node, calls);
  const bool is_causal = ir::int_attr(node.attrs, "is_causal", 0) != 0;
  const Arg scale =
      ir::has_attr(node.attrs, "scale") ? Arg(ir::float_attr(node.attrs, "scale", 0.0)) : Arg();
  if (has_fused_kernel(node) && !has_elements(node)) {
    // PyTorch chooses a kernel when it knows the sizes.
    calls.add("aten::scaled_dot_product_attention", "",
              {query, key, value, mask, 0.0, is_causal, scale, false}, {node.outputs[0]});
    return;
  }
  if (has_fused_kernel(node)) {
    calls.add("aten::_scaled_dot_product_flash_attention_for_cpu", "",
              {query, key, value, 0.0, is_causal, mask, scale}, {node.outputs[0], nullptr});
    return;
  }
  if (mask != nullptr && is_causal)
    throw Unsupported("Attention: a mask together with is_causal is not supported");
  const bool shares_keys = !((*key->type.shape)[1] == (*query->type.shape)[1]);
  calls.add("aten::_scaled_dot_product_attention_math", "",
            {query, key, value, mask, 0.0, is_causal, Arg(), scale, shares_keys},
            {node.outputs[0], nullptr});
}

int attention_since(const Node& node) {
  if (node.inputs.size() > 6) return 24;
  const bool has_window =
      ir::has_attr(node.attrs, "left_window_size") || ir::has_attr(node.attrs, "right_window_size");
  return has_window ? 25 : 23;
}

}  // namespace

void register_attention(Registry& ops) {
  Op attention;
  attention.name = "Attention";
  attention.min_inputs = 3;
  attention.max_inputs = 7;
  attention.attributes = {{"is_causal", kInt},
                          {"kv_num_heads", kInt},
                          {"left_window_size", kInt},
                          {"q_num_heads", kInt},
                          {"qk_matmul_output_mode", kInt},
                          {"right_window_size", kInt},
                          {"scale", kFloat},
                          {"softcap", kFloat},
                          {"softmax_precision", kInt}};
  attention.since = 23;
  attention.since_of = attention_since;
  attention.infer = infer_attention;
  attention.lower = lower_attention;
  ops.add(attention);
  ops.add(Operator{.name = aten::kFlashAttentionBackward, .check = check_attention_backward});
}

}  // namespace torch_ort::ops
