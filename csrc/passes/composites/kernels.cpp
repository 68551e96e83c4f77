// What becomes a kernel of the engine's: gradients of embeddings, and attention. These kernels
// write into planned memory, whereas PyTorch's allocate tensors.
#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/shapes.h"
#include "ops/sorted_sums.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"
#include "region/codegen.h"

#include <limits>

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

bool expand_embedding_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *ids = tensor(call.args.at(1));
  const auto* by_frequency = std::get_if<bool>(&call.args.at(4).value);
  const Value* result = node.outputs.at(0);
  const region::KernelRow* kernel = region::kernel_for(grad, "EmbeddingGrad");
  if (!is_fusible_float(grad) || kernel == nullptr || ids == nullptr || !ids->type.is_known() ||
      by_frequency == nullptr || *by_frequency || result == nullptr || !result->type.is_known() ||
      grad->type.shape->empty()) {
    return false;
  }
  const bool is_sorted = kernel->sorts_ids;
  const DType dtype = grad->type.dtype, id = ids->type.dtype;
  const bool has_dtypes =
      is_sorted ? id == DType::kInt64 || id == DType::kInt32
                : id == DType::kInt64 && (dtype == DType::kFloat || dtype == DType::kDouble);
  if (!has_dtypes || result->type.strides || !KnownSizes(graph).are_known(*grad)) return false;
  std::vector<Type> types = {result->type};
  if (is_sorted) {
    Shape of_ids = *grad->type.shape;
    of_ids.pop_back();
    types.push_back(ops::sorted_sums_workspace(ir::numel(of_ids), result->type, 0));
  }
  const auto* padding = std::get_if<ir::Dim>(&call.args.at(3).value);
  Expander write(graph, node, *grad);
  const Node& made = write.add({ir::kTorchOrtDomain, "EmbeddingGrad"}, {grad, ids}, types,
                               {{"padding_idx", padding == nullptr ? ir::Dim(-1) : *padding}});
  write.replace(0, made.outputs[0]);
  return true;
}

bool has_heads(const KnownSizes& sizes, const Value* value) {
  return is_fusible_float(value) && region::has_kernel(value, "Attention") &&
         value->type.shape->size() == 4 && sizes.are_known(*value);
}

// The arguments after the tensors are dropout, is_causal, mask and scale.
bool expand_attention(Graph& graph, Node& node, const char* op, size_t num_tensors) {
  const ops::Call call = ops::decode_aten(node);
  const KnownSizes sizes(graph);
  std::vector<Value*> inputs;
  for (size_t i = 0; i < num_tensors; ++i) {
    inputs.push_back(tensor(call.args.at(i)));
    if (inputs[i] == nullptr) return false;
    const DType dtype = inputs[0]->type.dtype;
    const bool is_logarithm = i == 5;
    if (inputs[i]->type.dtype != (is_logarithm ? ops::computed_dtype(dtype) : dtype)) return false;
  }
  const auto argument = [&](size_t i) {
    return num_tensors + i < call.args.size() ? call.args[num_tensors + i] : ops::Arg();
  };
  const ops::Arg dropout = argument(0), is_causal = argument(1), mask = argument(2),
                 scale = argument(3);
  const auto* probability = std::get_if<double>(&dropout.value);
  if (probability == nullptr || *probability != 0) return false;
  const bool is_backward = num_tensors > 3;
  for (size_t i = 0; i < 3; ++i) {
    if (!has_heads(sizes, inputs[i + (is_backward ? 1 : 0)])) return false;
  }
  // Input 4 is the result of the forward half, which the engine's kernel does not need.
  if (is_backward) inputs.erase(inputs.begin() + 4);
  ir::Attrs attrs;
  if (const auto* causal = std::get_if<bool>(&is_causal.value); causal != nullptr && *causal) {
    attrs["is_causal"] = ir::Dim(1);
  }
  if (const auto* factor = std::get_if<double>(&scale.value)) {
    attrs["scale"] = *factor;
  } else if (!scale.is_none()) {
    return false;
  }
  if (Value* added = tensor(mask)) {
    const DType dtype = inputs[0]->type.dtype;
    const bool fits = added->type.dtype == dtype || added->type.dtype == ops::computed_dtype(dtype);
    if (!fits || !sizes.are_known(*added)) return false;
    inputs.push_back(added);
  }
  std::vector<Type> types;
  for (const Value* output : node.outputs) {
    if (output == nullptr || !output->type.is_known()) return false;
    types.push_back(output->type);
  }
  if (types.size() != (is_backward ? 3 : 2)) return false;
  if (!is_backward && types[1].dtype != ops::computed_dtype(inputs[0]->type.dtype)) return false;
  Node& made = ops::Writer(graph, &node)
                   .add({ir::kTorchOrtDomain, op}, std::move(inputs), types, std::move(attrs));
  for (size_t i = 0; i < types.size(); ++i) {
    ir::replace_uses(*node.outputs[i], *made.outputs[i], graph);
  }
  return true;
}

bool expand_flash_attention(Graph& graph, Node& node) {
  return expand_attention(graph, node, "Attention", 3);
}

bool expand_flash_attention_backward(Graph& graph, Node& node) {
  return expand_attention(graph, node, "AttentionGrad", 6);
}

// The standard op, which inference has where nothing reads the logarithms of the sums.
bool expand_standard_attention(Graph& graph, Node& node) {
  const KnownSizes sizes(graph);
  for (size_t i = 0; i < 3; ++i) {
    if (!ops::has_input(node, i) || !has_heads(sizes, node.inputs[i])) return false;
  }
  for (size_t i = 4; i < node.inputs.size(); ++i) {
    if (node.inputs[i] != nullptr) return false;
  }
  for (size_t i = 1; i < node.outputs.size(); ++i) {
    if (node.outputs[i] != nullptr) return false;
  }
  for (const auto& [name, attr] : node.attrs) {
    if (name != "is_causal" && name != "scale") return false;
  }
  const Value &query = *node.inputs[0], &key = *node.inputs[1], &value = *node.inputs[2];
  const Shape &of_query = *query.type.shape, &of_key = *key.type.shape;
  const Shape& of_value = *value.type.shape;
  // Keys and values are packed for each call, which does not pay for so few queries.
  constexpr int64_t kLeastQueries = 4;
  const std::optional<int64_t> queries = hinted_size(graph, of_query[2]);
  if (queries && *queries < kLeastQueries) return false;
  const bool is_causal = ir::int_attr(node.attrs, "is_causal", 0) != 0;
  if (key.type.dtype != query.type.dtype || value.type.dtype != query.type.dtype ||
      node.outputs[0] == nullptr || !node.outputs[0]->type.is_known() ||
      !(of_query[1] == of_key[1]) || !(of_key[1] == of_value[1]) || !(of_query[3] == of_value[3]) ||
      (is_causal && !(of_query[2] == of_key[2]))) {
    return false;
  }
  Expander write(graph, node, query);
  std::vector<Value*> inputs(node.inputs.begin(), node.inputs.begin() + 3);
  ir::Attrs attrs = node.attrs;
  if (ops::has_input(node, 3)) {
    Value* mask = node.inputs[3];
    const size_t rank = mask->type.shape ? mask->type.shape->size() : 0;
    if (is_causal || (rank != 2 && rank != 4) || !sizes.are_known(*mask)) return false;
    if (mask->type.dtype == DType::kBool) {
      // The kernel's mask is true where a key is hidden.
      mask = write.make("Not", {mask});
      attrs.insert_or_assign("fill", -std::numeric_limits<double>::infinity());
    } else if (mask->type.dtype != query.type.dtype) {
      return false;
    }
    inputs.push_back(mask);
  }
  Type logarithms = ops::with_shape(query.type, Shape(of_query.begin(), of_query.end() - 1));
  logarithms.dtype = ops::computed_dtype(query.type.dtype);
  const Node& made = write.add({ir::kTorchOrtDomain, "Attention"}, std::move(inputs),
                               {node.outputs[0]->type, logarithms}, std::move(attrs));
  write.replace(0, made.outputs[0]);
  return true;
}

constexpr Expansion kRows[] = {
    {"Attention", expand_standard_attention},
    {ops::aten::kEmbeddingBackward, expand_embedding_backward},
    {ops::aten::kFlashAttention, expand_flash_attention},
    {ops::aten::kFlashAttentionBackward, expand_flash_attention_backward},
};

}  // namespace

std::span<const Expansion> kernels() { return kRows; }

}  // namespace torch_ort::passes::composites
