#include "passes/node_costs.h"

#include "ops/fusion.h"
#include "ops/op.h"
#include "passes/known_sizes.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;

// The share of a processor's peak speed that the kernels of products and of attention reach
// (benchmarks/products.py).
constexpr double kOfPeakInProducts = 0.8, kOfPeakInAttention = 0.4;
// The time to compute one element in a region, as the number of bytes that are moved in this time.
constexpr double kPlainWork = 0.4, kSlowWork = 2.5, kSlowestWork = 6;
// How often a node of an unknown op is assumed to pass over its operands.
constexpr double kPasses = 2;
constexpr double kMicros = 1e6;

double count(const Graph& graph, const Value& value) {
  if (!value.type.is_known()) return 0;
  return static_cast<double>(hinted_size(graph, ir::numel(*value.type.shape)).value_or(0));
}

double num_bytes(const Graph& graph, const Value& value) {
  return value.type.is_known()
             ? count(graph, value) * static_cast<double>(ir::size_bytes(value.type.dtype))
             : 0;
}

double bytes_moved(const Graph& graph, const Node& node) {
  double bytes = 0;
  for (const auto* list : {&node.inputs, &node.outputs}) {
    for (const Value* value : *list) {
      if (value != nullptr) bytes += num_bytes(graph, *value);
    }
  }
  return bytes;
}

// The size of a dim that is counted from the end, beginning with 1; 1 if the tensor has no such
// dim.
double size_from_end(const Graph& graph, const Value& value, size_t from_end) {
  if (!value.type.is_known() || value.type.shape->size() < from_end) return 1;
  const ir::Dim& dim = (*value.type.shape)[value.type.shape->size() - from_end];
  return static_cast<double>(hinted_size(graph, dim).value_or(1));
}

// The multiplications and additions of a matrix product; 0 for other nodes.
double product_flops(const Graph& graph, const Node& node) {
  const bool is_gemm = ir::is(&node, "Gemm");
  if (!is_gemm && !ir::is(&node, "MatMul")) return 0;
  const bool is_flipped = is_gemm && ir::int_attr(node.attrs, "transA", 0) != 0;
  const double depth = size_from_end(graph, *node.inputs[0], is_flipped ? 2 : 1);
  return 2 * depth * count(graph, *node.outputs[0]);
}

// Each element of the result is the sum of products with all weights of its channel.
double convolution_flops(const Graph& graph, const Node& node) {
  if (!ir::is(&node, "Conv") || node.inputs.size() < 2) return 0;
  const ir::Type& weight = node.inputs[1]->type;
  if (!weight.is_known() || weight.shape->empty()) return 0;
  const double channels =
      static_cast<double>(hinted_size(graph, weight.shape->front()).value_or(1));
  return 2 * count(graph, *node.outputs[0]) * count(graph, *node.inputs[1]) /
         std::max(channels, 1.0);
}

double attention_flops(const Graph& graph, const Node& node) {
  if (!ir::is(&node, "Attention", ir::kTorchOrtDomain)) return 0;
  const double seen = ir::int_attr(node.attrs, "is_causal", 0) != 0 ? 0.5 : 1;
  return seen * 4 * count(graph, *node.inputs[0]) * size_from_end(graph, *node.inputs[1], 2);
}

double work(const ops::FusedForm& form) {
  if (form.kind == Kind::kPass || form.kind == Kind::kNone) return 0;
  if (form.kind != Kind::kPointwise) return kSlowestWork;
  switch (ops::word(form.op).cost) {
    case ops::Cost::kPlain: return kPlainWork;
    case ops::Cost::kSlow: return kSlowWork;
    case ops::Cost::kCostly: return kSlowestWork;
  }
  return kSlowestWork;
}

}  // namespace

double micros_of(const Graph& graph, const Node& node, bool is_in_region, const Speeds& speeds) {
  if (ops::is_view(node) || node.inputs.empty() || node.outputs.empty()) return 0;
  const Value* result = node.outputs[0];
  if (result == nullptr) result = node.inputs[0];
  const double moving = kMicros * bytes_moved(graph, node) / speeds.bytes;
  const ops::FusedForm form = ops::fused_form(node);
  const double working = kMicros * work(form) * count(graph, *result) / speeds.bytes;
  if (is_in_region) return working;
  const double flops = product_flops(graph, node) + convolution_flops(graph, node);
  const double peak = speeds.flops(result->type.dtype);
  if (flops > 0) return std::max(moving, kMicros * flops / (peak * kOfPeakInProducts));
  if (const double of_attention = attention_flops(graph, node); of_attention > 0) {
    return std::max(moving, kMicros * of_attention / (peak * kOfPeakInAttention));
  }
  return form.kind != Kind::kNone ? working + moving : kPasses * moving;
}

}  // namespace torch_ort::passes
