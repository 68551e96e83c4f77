// Norms over the last dims: layer norm and RMS norm; variances and deviations over them.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/normalization.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// How many of the last dims a norm goes over.
int64_t num_normalized(const ops::Arg& shape) {
  return static_cast<int64_t>(std::get<ops::ArgList>(shape.value).size());
}

struct LayerNorm {
  Value *x, *weight, *bias;
  Shape columns;
  double epsilon;
};

bool write_layer_norm(Graph& graph, Node& node, const LayerNorm& norm) {
  if (!is_fusible_float(norm.x) || norm.columns.empty() || norm.columns.front().constant() <= 0)
    return false;
  Expander write(graph, node, *norm.x);
  ops::Formula& f = write.formula();
  const auto [result, mean, deviation] =
      ops::layer_norm(f, norm.x, norm.columns, norm.epsilon, norm.weight, norm.bias);
  write.replace(0, result);
  write.replace(1, mean);
  write.replace(2, f.reciprocal(deviation));
  return true;
}

bool expand_layer_norm(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || node.inputs.size() < 2) return false;
  const int64_t rank = ops::rank_of(*x), axis = ir::int_attr(node.attrs, "axis", -1);
  Value* bias = ops::has_input(node, 2) ? node.inputs[2] : nullptr;
  return write_layer_norm(graph, node,
                          {x, node.inputs[1], bias, range(axis < 0 ? axis + rank : axis, rank),
                           ir::float_attr(node.attrs, "epsilon", 1e-5)});
}

// A norm whose weight and input have different dtypes.
bool expand_native_layer_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const auto* epsilon = std::get_if<double>(&call.args.at(4).value);
  if (!is_fusible_float(x) || epsilon == nullptr) return false;
  return write_layer_norm(
      graph, node,
      {x, tensor(call.args.at(2)), tensor(call.args.at(3)),
       range(ops::rank_of(*x) - num_normalized(call.args.at(1)), ops::rank_of(*x)), *epsilon});
}

bool expand_layer_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *mean = tensor(call.args.at(3)), *rstd = tensor(call.args.at(4));
  Value* weight = tensor(call.args.at(5));
  if (!is_fusible_float(grad) || !is_fusible_float(x) || !is_fusible_float(mean) ||
      !is_fusible_float(rstd))
    return false;
  const int64_t rank = ops::rank_of(*x);
  const int64_t normalized = num_normalized(call.args.at(2));
  if (normalized >= rank) return false;
  const Shape columns = range(rank - normalized, rank);
  const Shape rows = range(0, rank - normalized);

  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  mean = write.statistic(mean);
  rstd = write.statistic(rstd);
  Value* normal = ops::normalized(f, x, mean, rstd);
  if (is_read(node, 0)) {
    write.replace(0, ops::layer_norm_gradient(f, grad, weight, normal, rstd, columns));
  }
  if (is_read(node, 1)) {
    write.replace(1, ops::layer_norm_weight_gradient(f, grad, normal, rows));
  }
  if (is_read(node, 2)) write.replace(2, f.total(grad, rows));
  return true;
}

struct RmsNorm {
  Value *x, *weight;
  Shape columns;
  std::optional<double> epsilon;
};

// Without a number PyTorch takes the machine epsilon of the dtype that it computes in.
double machine_epsilon(DType dtype) {
  return dtype == DType::kDouble ? std::numeric_limits<double>::epsilon()
                                 : std::numeric_limits<float>::epsilon();
}

bool write_rms_norm(Graph& graph, Node& node, const RmsNorm& norm) {
  if (!is_fusible_float(norm.x) || norm.columns.empty() || norm.columns.front().constant() <= 0)
    return false;
  Expander write(graph, node, *norm.x);
  const double epsilon = norm.epsilon ? *norm.epsilon : machine_epsilon(norm.x->type.dtype);
  const auto [result, rstd] =
      ops::rms_norm(write.formula(), norm.x, norm.columns, epsilon, norm.weight);
  write.replace(0, result);
  write.replace(1, rstd);
  return true;
}

bool expand_rms_norm(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x)) return false;
  const int64_t rank = ops::rank_of(*x), axis = ir::int_attr(node.attrs, "axis", -1);
  return write_rms_norm(graph, node,
                        {x, node.inputs.at(1), range(axis < 0 ? axis + rank : axis, rank),
                         ir::float_attr(node.attrs, "epsilon", 1e-5)});
}

// One that gives the factors of the rows as well, or has no weight or no epsilon.
bool expand_fused_rms_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const ops::Arg& given = call.args.at(3);
  const auto* epsilon = std::get_if<double>(&given.value);
  if (!is_fusible_float(x) || (epsilon == nullptr && !given.is_none())) return false;
  return write_rms_norm(
      graph, node,
      {x, tensor(call.args.at(2)),
       range(ops::rank_of(*x) - num_normalized(call.args.at(1)), ops::rank_of(*x)),
       epsilon == nullptr ? std::nullopt : std::optional(*epsilon)});
}

bool expand_rms_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *rstd = tensor(call.args.at(3)), *weight = tensor(call.args.at(4));
  if (!is_fusible_float(grad) || !is_fusible_float(x) || !is_fusible_float(rstd)) return false;
  const int64_t rank = ops::rank_of(*x), normalized = num_normalized(call.args.at(2));
  if (normalized >= rank) return false;

  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  rstd = write.statistic(rstd);
  Value* normal = f.mul(f.number(x), rstd);
  const Shape columns = range(rank - normalized, rank), rows = range(0, rank - normalized);
  if (is_read(node, 0)) {
    write.replace(0, ops::rms_norm_gradient(f, grad, weight, normal, rstd, columns));
  }
  if (is_read(node, 1)) {
    write.replace(1, ops::layer_norm_weight_gradient(f, grad, normal, rows));
  }
  return true;
}

// ---- variances and deviations, and means beside them

// The axes that a call names, sorted; none for None, which stands for all.
std::vector<int64_t> sorted_axes(const Node& node, const ops::Arg& dims, int64_t rank) {
  const auto* given = std::get_if<ops::ArgList>(&dims.value);
  if (given == nullptr) return {};
  Shape named;
  for (const ops::Arg& dim : *given) named.push_back(integer(dim));
  std::vector<int64_t> axes = ops::wrap_axes(node, named, rank);
  std::sort(axes.begin(), axes.end());
  return axes;
}

// The squared distances from the mean, added up and divided by as many as there are, less the
// correction; what is less than 0 counts as 0. PyTorch adds up in float64. Here distances are
// divided by the largest of their row, so that no square is lost or infinite, and what their sum is
// off from 0, because the mean is rounded, is taken out.
bool expand_variance(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  if (call.overload != "correction" || !is_fusible_float(x) || ops::rank_of(*x) == 0) return false;
  const int64_t rank = ops::rank_of(*x);
  const std::vector<int64_t> axes = sorted_axes(node, call.args.at(1), rank);
  const ops::Arg& given = call.args.at(2);
  const std::optional<double> correction = given.is_none() ? 1 : ops::as_double(given);
  const auto* keeps = std::get_if<bool>(&call.args.at(3).value);
  if (node.outputs[0] == nullptr || !node.outputs[0]->type.is_known()) return false;
  if (!are_last(axes, rank) || keeps == nullptr || !correction ||
      *correction != std::floor(*correction)) {
    return false;
  }
  const Dim count = num_along(*x, axes);
  if (!KnownSizes(graph).is_known(count)) return false;
  const Dim rest = ops::minus(count, static_cast<int64_t>(*correction));

  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  const Shape last = range(axes.front(), rank);
  constexpr double kLeast = 1e-37;  // its reciprocal is finite
  Value *numbers = write.number(x), *mean = f.mean(numbers, last);
  Value* distances = f.sub(numbers, mean);
  Value* largest = f.max(write.make("Abs", {distances}), last);
  Value* unit = write.make("Max", {largest, write.constant(kLeast)});
  Value* parts = f.quotient(distances, unit);
  Value* off = f.square(f.sum(parts, last));
  Value* squares = f.sub(f.sum(f.square(parts), last), f.mul(off, write.ratio(1, 1, count)));
  Value* divisor = write.ratio(1, Dim::make(ir::DimOp::kMax, rest, 0), 1);
  Value* share = write.make("Div", {write.make("Max", {squares, write.constant(0)}), divisor});
  const bool is_root = call.op == ops::aten::kStd || call.op == ops::aten::kStdMean;
  Value* result =
      is_root ? f.mul(write.make("Sqrt", {share}), unit) : f.mul(f.mul(share, unit), unit);
  const Shape& shape = *node.outputs[0]->type.shape;
  write.replace(0, *keeps ? result : write.reshape(result, shape));
  write.replace(1, *keeps ? mean : write.reshape(mean, shape));
  return true;
}

constexpr Expansion kRows[] = {
    {"LayerNormalization", expand_layer_norm},
    {"RMSNormalization", expand_rms_norm},
    {ops::aten::kLayerNorm, expand_native_layer_norm},
    {ops::aten::kLayerNormBackward, expand_layer_norm_backward},
    {ops::aten::kRmsNorm, expand_fused_rms_norm},
    {ops::aten::kRmsNormBackward, expand_rms_norm_backward},
    {ops::aten::kStd, expand_variance},
    {ops::aten::kStdMean, expand_variance},
    {ops::aten::kVar, expand_variance},
    {ops::aten::kVarMean, expand_variance},
};

}  // namespace

std::span<const Expansion> norms() { return kRows; }

}  // namespace torch_ort::passes::composites
