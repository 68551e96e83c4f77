// Losses of elements (squared and absolute errors, binary cross-entropy), their gradients, and
// means, which come after them. As in PyTorch, a mean is a sum that is divided once.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"

#include <algorithm>
#include <optional>

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// ---- what all of these losses take

// The operands of a loss, or those of its gradient, which has the incoming one first.
struct Loss {
  ops::Call call;
  Value *dy = nullptr, *x = nullptr, *target = nullptr;
  int64_t reduction = kMean;
  double number = 0;  // beta or delta; 0 where there is none
};

// Where they are among the arguments of the operator.
struct Places {
  bool has_gradient = false;
  size_t reduction;
  std::optional<size_t> number = std::nullopt;
};

// Nothing for operands that a region cannot take, or that are of two shapes or dtypes.
std::optional<Loss> find_loss(const Graph& graph, const Node& node, const Places& places) {
  Loss found{.call = ops::decode_aten(node)};
  const std::vector<ops::Arg>& args = found.call.args;
  const size_t first = places.has_gradient ? 1 : 0;
  found.x = tensor(args.at(first));
  found.target = tensor(args.at(first + 1));
  found.reduction = integer(args.at(places.reduction));
  const bool fits = is_fusible_float(found.x) && is_fusible_float(found.target) &&
                    found.x->type.dtype == found.target->type.dtype &&
                    found.x->type.shape == found.target->type.shape && ops::rank_of(*found.x) > 0 &&
                    KnownSizes(graph).are_known(*found.x);
  if (!fits) return std::nullopt;
  if (places.has_gradient) {
    found.dy = tensor(args.at(0));
    if (!is_fusible_float(found.dy)) return std::nullopt;
  }
  if (places.number) {
    const std::optional<double> number = ops::as_double(args.at(*places.number));
    if (!number || *number <= 0) return std::nullopt;  // with 0 it is the absolute error
    found.number = *number;
  }
  return found;
}

class LossWriter {
 public:
  LossWriter(Graph& graph, Node& node, const Loss& loss)
      : write_(graph, node, *loss.x), loss_(loss), f_(write_.formula()) {
    x = write_.number(loss.x);
    target = write_.number(loss.target);
  }

  ops::Formula& formula() { return f_; }
  Value* number(Value* value) { return write_.number(value); }
  Value* constant(double number) { return write_.constant(number); }
  Value* make(const char* op, std::vector<Value*> inputs) { return write_.make(op, inputs); }
  Value* log_sigmoid() { return write_.log_sigmoid(x, write_.decay(x)); }
  Value* error() { return f_.sub(x, target); }

  // The result of the loss, from those of its elements.
  bool reduce(Value* elements) {
    if (loss_.reduction == kNone) {
      write_.replace_elements(0, elements);
      return true;
    }
    Value* total = write_.sum_all(elements);
    if (loss_.reduction == kMean) total = make("Div", {total, write_.ratio(1, num_elements(), 1)});
    write_.replace(0, total);
    return true;
  }

  // The gradient of each element of the loss, times a factor.
  Value* gradient(double factor = 1) {
    Value* dy = number(loss_.dy);
    if (loss_.reduction == kMean) return f_.mul(dy, write_.ratio(factor, 1, num_elements()));
    return factor == 1 ? dy : f_.scaled(dy, factor);
  }

  bool replace(Value* gradient) {
    write_.replace_elements(0, gradient);
    return true;
  }

  Value *x, *target;

 private:
  Dim num_elements() const { return ir::numel(*loss_.x->type.shape); }

  Expander write_;
  const Loss& loss_;
  ops::Formula& f_;
};

// ---- squared error

bool expand_squared(Graph& graph, Node& node) {
  const std::optional<Loss> loss = find_loss(graph, node, {.reduction = 2});
  if (!loss) return false;
  LossWriter write(graph, node, *loss);
  return write.reduce(write.formula().square(write.error()));
}

bool expand_squared_grad(Graph& graph, Node& node) {
  const std::optional<Loss> loss = find_loss(graph, node, {.has_gradient = true, .reduction = 3});
  if (!loss) return false;
  LossWriter write(graph, node, *loss);
  ops::Formula& f = write.formula();
  return write.replace(f.mul(write.gradient(2), write.error()));
}

// ---- squared near 0, absolute beyond: Huber's loss, and the same divided by delta, which is
// smooth

struct Bend {
  double delta, scale;
};

// With m = min(|error|, delta): m (|error| - m / 2), which is error^2 / 2 near 0.
bool expand_bent(Graph& graph, Node& node, const Loss& loss, const Bend& bend) {
  LossWriter write(graph, node, loss);
  ops::Formula& f = write.formula();
  Value* size = write.make("Abs", {write.error()});
  Value* least = write.make("Min", {size, write.constant(bend.delta)});
  Value* line = f.add(size, f.scaled(least, -0.5));
  return write.reduce(f.mul(bend.scale == 1 ? least : f.scaled(least, bend.scale), line));
}

// The error within -delta and delta, times what comes.
bool expand_bent_grad(Graph& graph, Node& node, const Loss& loss, const Bend& bend) {
  LossWriter write(graph, node, loss);
  Value* error = write.make("Max", {write.error(), write.constant(-bend.delta)});
  Value* slope = write.make("Min", {error, write.constant(bend.delta)});
  return write.replace(write.formula().mul(write.gradient(bend.scale), slope));
}

bool expand_huber(Graph& graph, Node& node) {
  const auto loss = find_loss(graph, node, {.reduction = 2, .number = 3});
  return loss && expand_bent(graph, node, *loss, {loss->number, 1});
}

bool expand_huber_grad(Graph& graph, Node& node) {
  const auto loss = find_loss(graph, node, {.has_gradient = true, .reduction = 3, .number = 4});
  return loss && expand_bent_grad(graph, node, *loss, {loss->number, 1});
}

bool expand_smooth(Graph& graph, Node& node) {
  const auto loss = find_loss(graph, node, {.reduction = 2, .number = 3});
  return loss && expand_bent(graph, node, *loss, {loss->number, 1 / loss->number});
}

bool expand_smooth_grad(Graph& graph, Node& node) {
  const auto loss = find_loss(graph, node, {.has_gradient = true, .reduction = 3, .number = 4});
  return loss && expand_bent_grad(graph, node, *loss, {loss->number, 1 / loss->number});
}

// ---- binary cross-entropy

// Whether a weight that may be missing is one that a region can take, and that has a number for
// each x. PyTorch raises an error for a weight that has more.
bool may_weigh(const Value* weight, const Value& x) {
  if (weight == nullptr) return true;
  if (!is_fusible_float(weight) || weight->type.dtype != x.type.dtype) return false;
  const Shape &given = *weight->type.shape, &wanted = *x.type.shape;
  if (given.size() > wanted.size()) return false;
  const auto fits = [](const Dim& a, const Dim& b) { return a == Dim(1) || a == b; };
  return std::equal(given.rbegin(), given.rend(), wanted.rbegin(), fits);
}

// (1 - target) x - log(sigmoid(x)), where the weight of positive ones stands before the logarithm:
// 1 + (weight - 1) target.
bool expand_binary(Graph& graph, Node& node) {
  const std::optional<Loss> loss = find_loss(graph, node, {.reduction = 4});
  if (!loss) return false;
  Value *weight = tensor(loss->call.args.at(2)), *positive = tensor(loss->call.args.at(3));
  if (!may_weigh(weight, *loss->x) || !may_weigh(positive, *loss->x)) return false;
  LossWriter write(graph, node, *loss);
  ops::Formula& f = write.formula();
  Value* logarithm = write.log_sigmoid();
  if (positive != nullptr) {
    Value* more = f.sub(write.number(positive), write.constant(1));
    logarithm = f.mul(f.add(f.mul(more, write.target), write.constant(1)), logarithm);
  }
  Value* rest = f.sub(write.constant(1), write.target);
  Value* elements = f.sub(f.mul(rest, write.x), logarithm);
  if (weight != nullptr) elements = f.mul(elements, write.number(weight));
  return write.reduce(elements);
}

// dy (x - target) / max(x (1 - x), 1e-12). Forward stays PyTorch's kernel, which raises an error
// for numbers that are no probabilities.
bool expand_probability_grad(Graph& graph, Node& node) {
  const std::optional<Loss> loss = find_loss(graph, node, {.has_gradient = true, .reduction = 4});
  if (!loss) return false;
  Value* weight = tensor(loss->call.args.at(3));
  if (!may_weigh(weight, *loss->x)) return false;
  LossWriter write(graph, node, *loss);
  ops::Formula& f = write.formula();
  Value* slope = f.mul(f.sub(write.constant(1), write.x), write.x);
  Value* divisor = write.make("Max", {slope, write.constant(1e-12)});
  Value* gradient = write.make("Div", {f.mul(write.gradient(), write.error()), divisor});
  if (weight != nullptr) gradient = f.mul(gradient, write.number(weight));
  return write.replace(gradient);
}

// ---- means

// A mean over rows, or over everything, of what a region may compute: the sum becomes part of that.
// Means of rows are words of regions.
bool expand_mean(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || ops::rank_of(*x) == 0 || x->producer == nullptr) return false;
  if (ops::fused_form(*x->producer).kind != ops::FusedForm::Kind::kPointwise) return false;
  const std::optional<std::vector<int64_t>> axes = ops::reduction_axes(node);
  if (!axes || axes->empty() || are_last(*axes, ops::rank_of(*x))) return false;
  const Dim count = num_along(*x, *axes);
  if (!KnownSizes(graph).is_known(count)) return false;
  Expander write(graph, node, *x);
  std::vector<Value*> inputs = node.inputs;
  inputs[0] = write.number(x);
  Value* sum = write.make("ReduceSum", std::move(inputs), node.attrs);
  write.replace(0, write.make("Div", {sum, write.ratio(1, count, 1)}));
  return true;
}

constexpr Expansion kRows[] = {
    {"ReduceMean", expand_mean},
    {ops::aten::kBinaryCrossEntropyBackward, expand_probability_grad},
    {ops::aten::kBinaryCrossEntropyOfLogits, expand_binary},
    {ops::aten::kHuberLoss, expand_huber},
    {ops::aten::kHuberLossBackward, expand_huber_grad},
    {ops::aten::kMseLoss, expand_squared},
    {ops::aten::kMseLossBackward, expand_squared_grad},
    {ops::aten::kSmoothL1Loss, expand_smooth},
    {ops::aten::kSmoothL1LossBackward, expand_smooth_grad},
};

}  // namespace

std::span<const Expansion> element_losses() { return kRows; }

}  // namespace torch_ort::passes::composites
