#include "passes/border/costs.h"

#include "ops/fusion.h"
#include "ops/op.h"
#include "passes/known_sizes.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

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
// How often a value could be moved in the time that holding it costs. Memory that is free earlier
// is used again while it is in a cache. Measured: writing gelu(x) a second time, in the region of
// its gradient, takes no longer than holding it.
constexpr double kHold = 3;
constexpr double kMicros = 1e6;
// Of an H100 among others that NVLink connects, by its data sheet; half of its bandwidth to the
// others is what NCCL reaches. Not measured.
constexpr Speeds kGpu = {.flops_of_float = 60e12,
                         .flops_of_double = 60e12,
                         .flops_of_short = 900e12,
                         .bytes = 3e12,
                         .collective_us = 20,
                         .collective_bytes = 200e9};

double flops_a_second(const Speeds& speeds, ir::DType dtype) {
  if (dtype == ir::DType::kDouble) return speeds.flops_of_double;
  return ir::size_bytes(dtype) == 2 ? speeds.flops_of_short : speeds.flops_of_float;
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

bool is_free(const Node& node) {
  return ops::is_view(node) || node.inputs.empty() || node.outputs.empty();
}

const Value& result_of(const Node& node) {
  return node.outputs[0] != nullptr ? *node.outputs[0] : *node.inputs[0];
}

}  // namespace

Speeds speeds_of_ranks(const ir::Graph& graph, const Communication& communication) {
  const bool is_on_gpu = std::any_of(
      graph.values.begin(), graph.values.end(),
      [](const Value& value) { return value.type.is_known() && !ir::is_host(value.type.device); });
  Speeds speeds = is_on_gpu ? kGpu : Speeds();
  if (communication.collective_us > 0) speeds.collective_us = communication.collective_us;
  if (communication.collective_bytes > 0) speeds.collective_bytes = communication.collective_bytes;
  return speeds;
}

int64_t Costs::num_bytes(const Value& value) const {
  if (!value.type.is_known()) return 0;
  return hinted_size(graph_, ir::numel(*value.type.shape)).value_or(0) *
         ir::size_bytes(value.type.dtype);
}

double Costs::count(const Value& value) const {
  if (!value.type.is_known()) return 0;
  return static_cast<double>(hinted_size(graph_, ir::numel(*value.type.shape)).value_or(0));
}

double Costs::to_move_bytes(double bytes) const { return kMicros * bytes / speeds_.bytes; }

double Costs::to_move(const Value& value) const {
  return to_move_bytes(static_cast<double>(num_bytes(value)));
}

double Costs::to_hold(const Value& value) const { return kHold * to_move(value); }

// The size of a dim that is counted from the end, beginning with 1; 1 if the tensor has no such
// dim.
double Costs::size_from_end(const Value& value, size_t from_end) const {
  if (!value.type.is_known() || value.type.shape->size() < from_end) return 1;
  const ir::Dim& dim = (*value.type.shape)[value.type.shape->size() - from_end];
  return static_cast<double>(hinted_size(graph_, dim).value_or(1));
}

// The multiplications and additions of a matrix product; 0 for other nodes.
double Costs::product_flops(const Node& node) const {
  const bool is_gemm = ir::is(&node, "Gemm");
  if (!is_gemm && !ir::is(&node, "MatMul") && !ir::is(&node, "MatMulAdd", ir::kTorchOrtDomain)) {
    return 0;
  }
  const bool is_flipped = is_gemm && ir::int_attr(node.attrs, "transA", 0) != 0;
  return 2 * size_from_end(*node.inputs[0], is_flipped ? 2 : 1) * count(*node.outputs[0]);
}

// Each element of the result, or of what a transposed one reads, is multiplied with all weights of
// its channel.
double Costs::convolution_flops(const Node& node) const {
  const auto is_ours = [&](const char* op) { return ir::is(&node, op, ir::kTorchOrtDomain); };
  const bool is_found = ir::is(&node, "Conv") || is_ours("Convolution") ||
                        is_ours("DepthwiseConvolution") || is_ours("WinogradConvolution");
  if (!is_found || node.inputs.size() < 2) return 0;
  const bool is_transposed = ir::int_attr(node.attrs, "transposed", 0) != 0;
  const Value& places = is_transposed ? *node.inputs[0] : *node.outputs[0];
  const ir::Type& type = places.type;
  if (!type.is_known() || type.shape->size() < 2) return 0;
  const auto channels = static_cast<double>(hinted_size(graph_, (*type.shape)[1]).value_or(1));
  return 2 * count(places) * count(*node.inputs[1]) / std::max(channels, 1.0);
}

double Costs::attention_flops(const Node& node) const {
  if (!ir::is(&node, "Attention", ir::kTorchOrtDomain)) return 0;
  const double seen = ir::int_attr(node.attrs, "is_causal", 0) != 0 ? 0.5 : 1;
  return seen * 4 * count(*node.inputs[0]) * size_from_end(*node.inputs[1], 2);
}

double Costs::to_compute(const Node& node) const {
  if (is_free(node)) return 0;
  return to_move_bytes(work(ops::fused_form(node)) * count(result_of(node)));
}

double Costs::to_run(const Node& node) const {
  const bool has_result = !node.outputs.empty() && node.outputs[0] != nullptr;
  if (is_free(node) || (!has_result && node.inputs[0] == nullptr)) return 0;
  double moving = 0;
  for (const auto* list : {&node.inputs, &node.outputs}) {
    for (const Value* value : *list) moving += value == nullptr ? 0 : to_move(*value);
  }
  const double peak = flops_a_second(speeds_, result_of(node).type.dtype);
  if (const double flops = product_flops(node) + convolution_flops(node); flops > 0) {
    return std::max(moving, kMicros * flops / (peak * kOfPeakInProducts));
  }
  if (const double flops = attention_flops(node); flops > 0) {
    return std::max(moving, kMicros * flops / (peak * kOfPeakInAttention));
  }
  const bool is_fusible = ops::fused_form(node).kind != Kind::kNone;
  return is_fusible ? to_compute(node) + moving : kPasses * moving;
}

double Costs::to_communicate(const Node& start) const {
  double given = 0, made = 0;
  for (const Value* value : start.inputs)
    given += value == nullptr ? 0 : static_cast<double>(num_bytes(*value));
  for (const Value* value : start.outputs)
    made += value == nullptr ? 0 : static_cast<double>(num_bytes(*value));
  return speeds_.collective_us + kMicros * std::max(given, made) / speeds_.collective_bytes;
}

}  // namespace torch_ort::passes
