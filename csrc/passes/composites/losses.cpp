// Softmax, and losses by labels of rows.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "ops/softmax.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"

#include <limits>
#include <optional>

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- labels of rows

ir::Attrs ignored(const ops::Arg& index) { return {{"ignore_index", ir::Dim(integer(index))}}; }

// 1 for each row, but 0 for rows with the ignored label.
Value* find_valid(Expander& write, Value* label, const Type& row, const ir::Attrs& attrs) {
  return write.make_ours("RowValid", {label}, row, attrs);
}

// `numbers`, one for each row or one for all, but 0 for rows with the ignored label.
Value* keep_valid(Expander& write, Value* numbers, Value* valid) {
  return write.make("Where", {write.cast(valid, DType::kBool), numbers, write.constant(0)});
}

// The node that computes `x` by subtracting one number for each row from a matrix, if `x` is made
// so.
const Node* subtracts_from_rows(const Value& x) {
  const Node* node = x.producer;
  if (!ir::is(node, "Sub")) return nullptr;
  const Type &from = node->inputs[0]->type, &numbers = node->inputs[1]->type;
  const bool is_wide = x.type.dtype == DType::kFloat || x.type.dtype == DType::kDouble;
  const bool is_by_row = from.shape && numbers.shape && *from.shape == *x.type.shape &&
                         *numbers.shape == Shape{x.type.shape->at(0), Dim(1)};
  return is_wide && is_by_row ? node : nullptr;
}

// In each row of a matrix, the element that the label selects; an unspecified one for the ignored
// label. If the matrix was made by subtracting a number from each row, only the selected elements
// are subtracted from, so that the whole matrix need not be computed.
Value* pick(Expander& write, Value* x, Value* label, const Type& row, const ir::Attrs& attrs) {
  const Node* node = subtracts_from_rows(*x);
  if (node == nullptr) {
    return write.make_ours("RowPick", {write.number(x), label}, row, attrs);
  }
  Value* numbers = write.reshape(node->inputs[1], *row.shape);
  return write.make("Sub", {pick(write, node->inputs[0], label, row, attrs), numbers});
}

// ---- softmax

bool is_last_axis(int64_t axis, const Value& value) {
  return ops::rank_of(value) > 0 && (axis == -1 || axis == ops::rank_of(value) - 1);
}

bool expand_softmax(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || !is_last_axis(ir::int_attr(node.attrs, "axis", -1), *x)) return false;
  const auto formula = node.op.name == "LogSoftmax" ? ops::log_softmax : ops::softmax;
  Expander write(graph, node, *x);
  write.replace(0, formula(write.formula(), x, {ops::rank_of(*x) - 1}));
  return true;
}

// The logarithm of the sum of e^x over the last dims, of distances from the largest x if that is
// finite.
bool expand_log_sum_exp(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || ops::rank_of(*x) == 0) return false;
  const std::optional<std::vector<int64_t>> axes = ops::reduction_axes(node);
  const int64_t rank = ops::rank_of(*x);
  if (!axes || !are_last(*axes, rank)) return false;
  const Value* result = node.outputs[0];
  if (!result->type.is_known()) return false;
  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  const Shape last = range(axes->front(), rank);
  Value *numbers = write.number(x), *largest = f.max(numbers, last);
  Value* size = write.make("Abs", {largest});
  Value* is_finite = write.make("Less", {size, write.constant(kInfinity)});
  Value* from = write.make("Where", {is_finite, largest, write.constant(0)});
  Value* sum = f.sum(write.make("Exp", {f.sub(numbers, from)}), last);
  Value* logarithm = f.add(write.make("Log", {sum}), from);
  write.replace(0, write.reshape(logarithm, *result->type.shape));
  return true;
}

// (..., columns) -> (..., 1). The gradient of a loss has one nonzero element in each row, which is
// then the sum of the row.
Value* sum_of_rows(Expander& write, Value* grad) {
  const Node* maker = grad->producer;
  if (!ir::is(maker, "RowScatter", ir::kTorchOrtDomain)) {
    return write.reduce("ReduceSum", grad, {ops::rank_of(*grad) - 1}, true);
  }
  Value *label = maker->inputs[0], *numbers = maker->inputs[1];
  const Dim& rows = label->type.shape->at(0);
  const Type row = write.typed(*label->type.shape, *grad);
  Value* sum = keep_valid(write, numbers, find_valid(write, label, row, maker->attrs));
  return write.reshape(sum, {rows, Dim(1)});
}

bool expand_softmax_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *result = tensor(call.args.at(1));
  if (!is_fusible_float(grad) || !is_fusible_float(result)) return false;
  if (!is_last_axis(integer(call.args.at(2)), *result)) return false;

  Expander write(graph, node, *result);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  result = f.number(result);
  if (call.op == ops::aten::kLogSoftmaxBackward) {
    write.replace(0, ops::log_softmax_gradient(f, grad, result, sum_of_rows(write, grad)));
  } else {
    write.replace(0, ops::softmax_gradient(f, grad, result, {ops::rank_of(*result) - 1}));
  }
  return true;
}

// ---- losses

// Whether the loss takes rows of log-probabilities and one label for each, without weights, and the
// label that is ignored is no size of another tensor.
bool is_plain_nll(const Value* x, const Value* target, const Value* weight,
                  const ops::Arg& ignored_label) {
  return is_fusible_float(x) && ops::rank_of(*x) == 2 && weight == nullptr &&
         is_constant(ignored_label) && target != nullptr && target->type.is_known() &&
         target->type.dtype == DType::kInt64 && ops::rank_of(*target) == 1;
}

bool expand_nll(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *x = tensor(call.args.at(0)), *target = tensor(call.args.at(1));
  if (!is_plain_nll(x, target, tensor(call.args.at(2)), call.args.at(4))) return false;
  const int64_t reduction = integer(call.args.at(3));
  if (reduction == kNone) return false;

  Expander write(graph, node, *x);
  const ir::Attrs attrs = ignored(call.args.at(4));
  const Type row = write.typed(*target->type.shape, *x);
  Value* picked = pick(write, x, target, row, attrs);
  Value* valid = find_valid(write, target, row, attrs);
  if (subtracts_from_rows(*x) != nullptr) picked = keep_valid(write, picked, valid);
  Value *loss = write.sum_all(picked), *count = write.sum_all(valid);
  if (reduction == kMean) loss = write.make("Div", {loss, count});
  write.replace(0, write.make("Neg", {loss}));
  write.replace(1, count);
  return true;
}

bool expand_nll_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *target = tensor(call.args.at(2)), *count = tensor(call.args.at(6));
  if (!is_plain_nll(x, target, tensor(call.args.at(3)), call.args.at(5)) ||
      !is_fusible_float(grad)) {
    return false;
  }
  const int64_t reduction = integer(call.args.at(4));

  Expander write(graph, node, *x);
  grad = write.number(grad);
  if (reduction == kMean) grad = write.make("Div", {grad, write.number(count)});
  write.replace(0, write.make_ours("RowScatter", {target, write.make("Neg", {grad})},
                                   write.typed(*x->type.shape, *x), ignored(call.args.at(5))));
  return true;
}

constexpr Expansion kRows[] = {
    {"LogSoftmax", expand_softmax},
    {"ReduceLogSumExp", expand_log_sum_exp},
    {"Softmax", expand_softmax},
    {ops::aten::kLogSoftmaxBackward, expand_softmax_backward},
    {ops::aten::kNllLoss, expand_nll},
    {ops::aten::kNllLossBackward, expand_nll_backward},
    {ops::aten::kSoftmaxBackward, expand_softmax_backward},
};

}  // namespace

std::span<const Expansion> losses() { return kRows; }

}  // namespace torch_ort::passes::composites
