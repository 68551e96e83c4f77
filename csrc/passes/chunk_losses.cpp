// The cross-entropy of a linear layer -> torch_ort.LinearCrossEntropy (ops/linear_loss.h), which
// makes the logits some rows at a time:
//
//   NllLoss(LogSoftmax(views and casts of MatMul(hidden, weight^T) + bias), labels)
//
// In backward the loss has one number as its gradient. So the kernel makes the gradients of hidden
// rows, weight and bias in the forward half, where logits are at hand, and backward multiplies them
// with that number: nothing of rows x classes crosses the border. Logits that something else of the
// forward half reads are written once. Where these have a gradient of their own, that goes the old
// way, and both are added up: it is cut off where none comes.
//
// Of the logits there may be read besides, and have gradients, the sum of the logarithms of all
// probabilities of a row (label smoothing), and the logarithm of the sum of all powers, squared in
// the end (a z-loss). And the losses may be those of single rows. Then each row has gradients of
// its own. These are known in the forward half but for one number, if all of them are multiples of
// the same one (passes/multiples.h), as they are where means and sums of rows are made, with any
// weights. The logits may have a soft cap, cap * tanh(product / cap). Rows of logits that a slice
// cuts off before the loss are rows whose label does not count.
//
// Declines where gradients of rows are other ones, where logits are read in backward, and where
// that saves little memory.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/linear_loss.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/attention_words.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/multiples.h"
#include "passes/pass.h"
#include "passes/unread.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using attention::keeps_elements;
using attention::shape_of;
using attention::swaps_last_dims;
using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// What logits take, less what the gradient of the weight takes, which stands from the forward half
// on. Below it both ways take equally long, and there is little to save.
constexpr int64_t kLeastSaving = 32 << 20;

Value* tensor(const ops::Arg& arg) {
  Value* const* value = std::get_if<Value*>(&arg.value);
  return value == nullptr ? nullptr : *value;
}

int64_t integer(const ops::Arg& arg) { return std::get<Dim>(arg.value).constant(); }

bool is_short(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kHalf; }

// A short float in float32 or the other way: regions do not round in between either.
bool is_cast(const Node& node) {
  if (!ir::is(&node, "Cast") || !is_real(node.inputs[0]) || !is_real(node.outputs[0])) return false;
  const DType from = node.inputs[0]->type.dtype, to = node.outputs[0]->type.dtype;
  return (is_short(from) || is_short(to)) && from != DType::kDouble && to != DType::kDouble;
}

bool is_last_kept(const Node& node) {
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  return !from.empty() && !to.empty() && from.back() == to.back();
}

// Whether rows go through it as they are.
bool keeps_rows(const Node& node) {
  return is_cast(node) || (keeps_elements(node) && is_last_kept(node));
}

// What a slice cuts off an axis that is not the last one.
struct Cut {
  size_t axis;
  int64_t before, after;
};

std::optional<Cut> cut_of(const Node& node) {
  if (!ir::is(&node, "Slice") || !is_real(node.inputs[0]) || !is_real(node.outputs[0])) {
    return std::nullopt;
  }
  Dim numbers[] = {0, 0, 0, 1};  // start, end, axis, step
  for (size_t slot = 1; slot <= 4; ++slot) {
    if (!ops::has_input(node, slot)) continue;
    if (!ops::has_known_ints(node.inputs[slot])) return std::nullopt;
    const Shape given = ops::known_ints(node.inputs[slot]);
    if (given.size() != 1) return std::nullopt;
    numbers[slot - 1] = given[0];
  }
  const auto& [start, end, axis, step] = numbers;
  if (!start.is_constant() || !axis.is_constant() || !(step == Dim(1))) return std::nullopt;
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  const auto at =
      static_cast<size_t>(ops::wrap_axis(node, axis.constant(), static_cast<int64_t>(from.size())));
  if (at + 1 == from.size()) return std::nullopt;
  const Dim before = start.constant() < 0 ? ops::plus(from[at], start) : start;
  const Dim after = ops::minus(ops::minus(from[at], to[at]), before);
  if (!before.is_constant() || !after.is_constant()) return std::nullopt;
  if (before.constant() < 0 || after.constant() < 0) return std::nullopt;
  return Cut{at, before.constant(), after.constant()};
}

// The gradient of what `slice` cuts: zeros where nothing has come through.
bool is_gradient_of_cut(const Node& node, const Node& slice) {
  const std::optional<Cut> cut = cut_of(slice);
  if (!cut || ops::key_of(node) != ops::aten::kSliceBackward) return false;
  const ops::Call call = ops::decode_aten(node);
  const auto number = [&](size_t i) { return std::get_if<Dim>(&call.args.at(i).value); };
  const Dim *axis = number(2), *start = number(3), *step = number(5);
  if (axis == nullptr || start == nullptr || step == nullptr) return false;
  const Shape &from = shape_of(*node.inputs[0]), &to = shape_of(*node.outputs[0]);
  if (!(from == shape_of(*slice.outputs[0])) || !(to == shape_of(*slice.inputs[0]))) return false;
  const int64_t at = ops::wrap_axis(node, axis->constant(), static_cast<int64_t>(to.size()));
  const Dim before = start->is_constant() && start->constant() < 0
                         ? ops::plus(to[static_cast<size_t>(at)], *start)
                         : *start;
  return at == static_cast<int64_t>(cut->axis) && before == Dim(cut->before) && *step == Dim(1);
}

// A product with a number that is known, of any type.
std::optional<attention::Multiple> scaled(const Node& node) {
  if (node.op.domain != ir::kAtenDomain) return attention::multiple(node);
  const std::string key = ops::key_of(node);
  if ((key != ops::aten::kMul && key != ops::aten::kDiv) || node.inputs.size() != 1) {
    return std::nullopt;
  }
  const ops::Call call = ops::decode_aten(node);
  const auto* factor = call.args.size() == 2 ? std::get_if<double>(&call.args[1].value) : nullptr;
  if (factor == nullptr || *factor == 0 || !is_real(node.inputs[0]) || !is_real(node.outputs[0])) {
    return std::nullopt;
  }
  return attention::Multiple{node.inputs[0], key == ops::aten::kDiv ? 1 / *factor : *factor};
}

// Where a node of the chain reads them.
size_t slot_of_logits(const Node& node) {
  return ir::is(&node, "Mul") && ops::known_double(node.inputs[0]) ? 1 : 0;
}

bool lies_by_rows(const Value& value) {
  return !value.type.strides || *value.type.strides == ir::contiguous_strides(shape_of(value));
}

// What the rows of a matrix were before they were viewed as such.
const Value* rows_of(const Value* value) {
  while (value->producer != nullptr && keeps_elements(*value->producer) &&
         is_last_kept(*value->producer)) {
    value = value->producer->inputs[0];
  }
  return value;
}

// The same matrix, turned over twice or not at all.
const Value* matrix_of(const Value* value) {
  while (swaps_last_dims(value->producer) &&
         swaps_last_dims(value->producer->inputs[0]->producer)) {
    value = value->producer->inputs[0]->producer->inputs[0];
  }
  return value;
}

bool is_turned(const Value* value, const Value* other) {
  const auto turns = [](const Value* made, const Value* from) {
    return swaps_last_dims(made->producer) && matrix_of(made->producer->inputs[0]) == from;
  };
  value = matrix_of(value);
  other = matrix_of(other);
  return turns(value, other) || turns(other, value);
}

// Gradients as the old nodes make them.
struct Backward {
  Value* gradient = nullptr;  // of the loss; or what that and those of rows are multiples of
  Value *of_loss = nullptr, *of_sums = nullptr, *of_logsumexp = nullptr;
  std::vector<Node*> hidden, weight, bias;
  Node* added = nullptr;  // the sum with a gradient that logits have from elsewhere
  Value* elsewhere = nullptr;
  Node* of_tanh = nullptr;  // where it goes through a soft cap
  Node* square = nullptr;   // the sum with what comes from the logarithm of the sum of powers
  int square_index = 0;     // where it has the other gradient
  std::vector<Node*> nodes;

  bool has_any() const { return !hidden.empty() || !weight.empty() || !bias.empty(); }
};

struct Match {
  Node *softmax, *loss, *product;
  Node* sums = nullptr;       // of logarithms
  Node* weighting = nullptr;  // by weights of classes, before they are summed
  Node* logsumexp = nullptr;
  // Of a soft cap, the last of which makes the logits; all three stand in the chain.
  Node *inner = nullptr, *tanh = nullptr, *outer = nullptr;
  Node* first = nullptr;     // of the nodes that are replaced and read logits
  std::vector<Node*> chain;  // from the softmax up to the product, that one not included
  Value *hidden, *weight, *bias = nullptr, *labels, *class_weight;
  ops::LinearLoss form;
  std::optional<Backward> backward;
  std::optional<Multiples> multiples;  // where rows have numbers of their own
};

Multiples::Factors factors_of(const Match& match, const Value* number) {
  return {number, match.logsumexp == nullptr ? nullptr : match.logsumexp->outputs[0]};
}

// What the new node and those beside it read.
std::vector<Value*> read_first(const Match& match) {
  std::vector<Value*> read = {match.labels};
  if (match.class_weight != nullptr) read.push_back(match.class_weight);
  for (const Node* node : match.chain) {
    for (size_t i = 1; i < node->inputs.size(); ++i) {
      if (node->inputs[i] != nullptr) read.push_back(node->inputs[i]);
    }
  }
  if (!match.backward) return read;
  const Backward& backward = *match.backward;
  for (const Value* gradient : {backward.of_loss, backward.of_sums, backward.of_logsumexp}) {
    if (gradient == nullptr) continue;
    const auto early =
        match.multiples->parts_of(gradient, factors_of(match, backward.gradient)).early;
    read.insert(read.end(), early.begin(), early.end());
  }
  return read;
}

// How many rows the logits have.
Dim rows_of_product(const Match& match) {
  Shape rows = shape_of(*match.product->outputs[0]);
  rows.pop_back();
  return ir::numel(rows);
}

bool has_cut(const Match& match) {
  return std::any_of(match.chain.begin(), match.chain.end(),
                     [](const Node* node) { return cut_of(*node).has_value(); });
}

// Weights of classes as they stand beside rows of logits.
bool is_row_of(const Value* value, const Value* weights) {
  const Dim classes = shape_of(*weights)[0];
  if (value->producer != nullptr && keeps_elements(*value->producer)) {
    const Shape& shape = shape_of(*value);
    if (shape.empty() || !(shape.back() == classes) || !(ir::numel(shape) == classes)) return false;
    value = value->producer->inputs[0];
  }
  return value == weights;
}

class Matcher {
 public:
  explicit Matcher(const Graph& graph)
      : graph_(graph), sizes_(graph), memory_(graph), backward_(backward_nodes(graph)) {
    int position = 0;
    for (const Node& node : graph.nodes) positions_[&node] = position++;
  }

  std::optional<Match> find(Node& softmax) const {
    if (!ir::is(&softmax, "LogSoftmax") || backward_.contains(&softmax)) return std::nullopt;
    if (!is_real(softmax.inputs[0]) || !is_real(softmax.outputs[0])) return std::nullopt;
    const Value& logits = *softmax.inputs[0];
    const int64_t axis = ir::int_attr(softmax.attrs, "axis", -1);
    if (shape_of(logits).size() != 2 || (axis != 1 && axis != -1)) return std::nullopt;
    if (!sizes_.are_known(logits) || !shape_of(logits)[1].is_constant()) return std::nullopt;
    Match match{.softmax = &softmax};
    const bool is_found = find_loss(match) && find_product(match) && find_logsumexp(match) &&
                          find_backward(match) && find_gradients_of_rows(match) &&
                          find_other_readers(match) && has_no_tags(match) && pays(match);
    return is_found ? std::optional(std::move(match)) : std::nullopt;
  }

 private:
  bool is_backward(const Node* node) const { return backward_.contains(node); }

  static bool is_plain(const ir::Use& use) { return use.node != nullptr && use.index >= 0; }

  // ---- the loss

  bool find_loss(Match& match) const {
    match.loss = nullptr;
    for (const ir::Use& use : match.softmax->outputs[0]->uses) {
      if (!is_plain(use)) return false;
      if (is_backward(use.node)) continue;
      const bool is_loss = ops::key_of(*use.node) == ops::aten::kNllLoss;
      if ((is_loss ? match.loss : match.sums) != nullptr) return false;
      if (is_loss) {
        match.loss = use.node;
      } else if (!find_sums(match, *use.node)) {
        return false;
      }
    }
    if (match.loss == nullptr) return false;
    const ops::Call call = ops::decode_aten(*match.loss);
    match.labels = tensor(call.args.at(1));
    match.class_weight = tensor(call.args.at(2));
    const int64_t reduction = integer(call.args.at(3));  // 0: none, 1: mean, 2: sum
    if (tensor(call.args.at(0)) != match.softmax->outputs[0]) return false;
    const Value* weight = match.class_weight;
    if (weight != nullptr && (!is_real(weight) || shape_of(*weight).size() != 1)) return false;
    if (match.sums != nullptr) {
      const bool fits = weight == nullptr
                            ? match.weighting == nullptr
                            : match.weighting != nullptr && is_row_of(factor_of(match), weight);
      if (!fits) return false;
      match.form.has_sums = true;
    }
    const Type& labels = match.labels->type;
    if (!labels.is_known() || labels.dtype != DType::kInt64 || labels.shape->size() != 1) {
      return false;
    }
    match.form.has_class_weight = weight != nullptr;
    match.form.reduction = static_cast<ops::Reduction>(reduction);
    match.form.ignore_index = integer(call.args.at(4));
    return true;
  }

  // Of the logarithms, or of these times weights of classes.
  static bool find_sums(Match& match, Node& reader) {
    Node* node = &reader;
    if (ir::is(node, "Mul") && node->inputs[0] != node->inputs[1]) {
      match.weighting = node;
      const auto& uses = node->outputs[0]->uses;
      if (uses.size() != 1 || !is_plain(uses[0])) return false;
      node = uses[0].node;
    }
    if (!ir::is(node, "ReduceSum") || !sums_classes(*node)) return false;
    match.sums = node;
    return true;
  }

  static bool sums_classes(const Node& node) {
    if (!is_real(node.inputs[0]) || !is_real(node.outputs[0])) return false;
    const auto last = static_cast<int64_t>(shape_of(*node.inputs[0]).size()) - 1;
    return ops::reduction_axes(node) == std::vector<int64_t>{last};
  }

  static Value* factor_of(const Match& match) {
    const auto& inputs = match.weighting->inputs;
    return inputs[inputs[0] == match.softmax->outputs[0] ? 1 : 0];
  }

  // Of what goes into the softmax, or of what that is made of, but for rows that are cut off.
  bool find_logsumexp(Match& match) const {
    std::vector<Node*> made = match.chain;
    made.push_back(match.product);
    bool is_capped = match.outer == nullptr;
    for (auto node = made.rbegin(); node != made.rend() && !cut_of(**node); ++node) {
      is_capped |= *node == match.outer;
      if (!is_capped) continue;
      for (const ir::Use& use : (*node)->outputs[0]->uses) {
        if (!is_plain(use) || is_backward(use.node) || !ir::is(use.node, "ReduceLogSumExp")) {
          continue;
        }
        if (match.logsumexp != nullptr || !sums_classes(*use.node)) return false;
        match.logsumexp = use.node;
        match.form.has_logsumexp = true;
      }
    }
    match.first = match.loss;
    for (Node* node : {match.sums, match.logsumexp}) {
      if (node != nullptr && positions_.at(node) < positions_.at(match.first)) match.first = node;
    }
    return true;
  }

  // ---- the product

  bool find_product(Match& match) const {
    Value* value = match.softmax->inputs[0];
    while (value->producer != nullptr && !is_backward(value->producer)) {
      Node& node = *value->producer;
      if (keeps_rows(node) || cut_of(node)) {
        match.chain.push_back(&node);
        value = node.inputs[0];
      } else if (match.outer != nullptr || !find_cap(match, node, value)) {
        break;
      }
    }
    Node* product = match.product = value->producer;
    const bool is_gemm = ir::is(product, "Gemm");
    if (product == nullptr || (!is_gemm && !ir::is(product, "MatMul"))) return false;
    for (const char* name : {"alpha", "beta"}) {
      if (ir::float_attr(product->attrs, name, 1) != 1) return false;
    }
    for (const char* name : {"transA", "transB"}) {
      if (ir::int_attr(product->attrs, name, 0) != 0) return false;
    }
    match.hidden = product->inputs[0];
    match.weight = product->inputs[1];
    if (!is_real(match.hidden) || !is_real(match.weight) || !is_real(value)) return false;
    const Shape &rows = shape_of(*match.hidden), &weight = shape_of(*match.weight);
    if (rows.size() < 2 || weight.size() != 2 || !weight[0].is_constant()) return false;
    if (match.hidden->type.dtype != match.weight->type.dtype || !sizes_.are_known(*match.hidden)) {
      return false;
    }
    const bool is_double = match.hidden->type.dtype == DType::kDouble;
    if (is_double != (match.softmax->outputs[0]->type.dtype == DType::kDouble)) return false;
    if (is_gemm && ops::has_input(*product, 2)) {
      match.bias = product->inputs[2];
      if (!is_real(match.bias) || !(shape_of(*match.bias) == Shape{weight[1]})) return false;
      match.form.has_bias = true;
    }
    for (const Value* each : {match.hidden, match.weight, match.bias, match.labels,
                              match.class_weight, product->outputs[0]}) {
      if (each != nullptr && memory_.is_written(each)) return false;
    }
    return true;
  }

  // factor * tanh(logits / factor), with casts in between.
  bool find_cap(Match& match, Node& outer, Value*& value) const {
    std::vector<Node*> found = {&outer};
    const std::optional<attention::Multiple> outside = scaled(outer);
    if (!outside) return false;
    const auto next = [&](Value* made) {
      while (made->producer != nullptr && is_cast(*made->producer)) {
        found.push_back(made->producer);
        made = made->producer->inputs[0];
      }
      found.push_back(made->producer);
      return made->producer;
    };
    Node* tanh = next(outside->of);
    if (!ir::is(tanh, "Tanh")) return false;
    Node* inner = next(tanh->inputs[0]);
    const std::optional<attention::Multiple> inside =
        inner == nullptr ? std::nullopt : scaled(*inner);
    if (!inside || outside->factor <= 0) return false;
    if (!attention::are_close(inside->factor * outside->factor, 1)) return false;
    match.inner = inner;
    match.tanh = tanh;
    match.outer = &outer;
    match.form.soft_cap = outside->factor;
    match.chain.insert(match.chain.end(), found.begin(), found.end());
    value = inside->of;
    return true;
  }

  // The next step of a gradient through a soft cap, of which `stage` are done.
  static bool is_uncapped(const Match& match, const Node& node, int stage) {
    if (match.outer == nullptr || stage > 2) return false;
    if (stage == 1) {
      if (ops::key_of(node) != ops::aten::kTanhBackward) return false;
      return node.inputs.size() == 2 && node.inputs[1] == match.tanh->outputs[0];
    }
    const std::optional<attention::Multiple> multiple = scaled(node);
    const double cap = match.form.soft_cap;
    return multiple && attention::are_close(multiple->factor, stage == 0 ? cap : 1 / cap);
  }

  // ---- the backward half

  bool find_backward(Match& match) const {
    Node *of_loss = nullptr, *of_softmax = nullptr;
    for (const ir::Use& use : match.softmax->outputs[0]->uses) {
      if (!is_backward(use.node)) continue;
      const std::string key = ops::key_of(*use.node);
      Node** found = key == ops::aten::kNllLossBackward      ? &of_loss
                     : key == ops::aten::kLogSoftmaxBackward ? &of_softmax
                                                             : nullptr;
      if (found == nullptr || *found != nullptr) return false;
      *found = use.node;
    }
    if (!is_read_only_by(match.loss->outputs.at(1), of_loss)) return false;
    if (of_loss == nullptr && of_softmax == nullptr) return true;
    if (of_loss == nullptr || of_softmax == nullptr) return false;
    const ops::Call call = ops::decode_aten(*of_loss), next = ops::decode_aten(*of_softmax);
    Backward found;
    found.gradient = found.of_loss = tensor(call.args.at(0));
    Value* of_logarithms = tensor(next.args.at(0));
    if (match.form.has_sums && of_logarithms != of_loss->outputs[0]) {
      if (!find_gradient_of_sums(match, *of_logarithms, *of_loss, found)) return false;
      of_logarithms = of_loss->outputs[0];
    }
    const bool fits = tensor(call.args.at(1)) == match.softmax->outputs[0] &&
                      tensor(call.args.at(3)) == match.class_weight &&
                      tensor(call.args.at(6)) == match.loss->outputs[1] &&
                      of_logarithms == of_loss->outputs[0] &&
                      of_loss->outputs[0]->uses.size() == 1 && is_real(found.gradient) &&
                      shape_of(*found.gradient).size() == shape_of(*match.loss->outputs[0]).size();
    if (!fits) return false;
    found.nodes.insert(found.nodes.end(), {of_loss, of_softmax});
    if (!follow(match, *of_softmax->outputs[0], false, 0, found)) return false;
    match.form.has_hidden_grad = !found.hidden.empty();
    match.form.has_weight_grad = !found.weight.empty();
    match.form.has_bias_grad = !found.bias.empty();
    match.backward = std::move(found);
    return match.form.has_grad();
  }

  // The sum of the gradients of labelled and of all logarithms; the latter is the same number in
  // all places of a row, or that times weights of classes.
  bool find_gradient_of_sums(const Match& match, Value& sum, const Node& of_loss,
                             Backward& found) const {
    Node* add = sum.producer;
    if (!ir::is(add, "Add") || sum.uses.size() != 1) return false;
    found.nodes.push_back(add);
    Value* value = add->inputs[add->inputs[0] == of_loss.outputs[0] ? 1 : 0];
    if (match.weighting != nullptr) {
      Node* product = value->producer;
      if (!ir::is(product, "Mul") || value->uses.size() != 1) return false;
      const bool is_second = product->inputs[1] == factor_of(match);
      if (!is_second && product->inputs[0] != factor_of(match)) return false;
      found.nodes.push_back(product);
      value = product->inputs[is_second ? 0 : 1];
    }
    Node* expand = value->producer;
    if (!ir::is(expand, "Expand") || !is_real(expand->inputs[0])) return false;
    if (!(shape_of(*value) == shape_of(*match.softmax->outputs[0]))) return false;
    const Shape& rows = shape_of(*expand->inputs[0]);
    if (rows.size() != 2 || !(rows[1] == Dim(1)) || !(rows[0] == shape_of(*value)[0])) return false;
    found.nodes.push_back(expand);
    found.of_sums = expand->inputs[0];
    return true;
  }

  // What comes of the logarithm of the sum of powers: its gradient times probabilities.
  bool find_gradient_of_logsumexp(const Match& match, Value* value, Backward& found) const {
    if (match.logsumexp == nullptr || found.of_logsumexp != nullptr) return false;
    const auto producer_of = [&](const Value* made, const char* op) {
      const bool is_one = ir::is(made->producer, op) && made->uses.size() == 1;
      if (is_one) found.nodes.push_back(made->producer);
      return is_one ? made->producer : nullptr;
    };
    while (value->producer != nullptr && is_backward(value->producer) &&
           keeps_rows(*value->producer) && value->uses.size() == 1) {
      found.nodes.push_back(value->producer);
      value = value->producer->inputs[0];
    }
    const Node* product = producer_of(value, "Mul");
    if (product == nullptr) return false;
    const size_t side = ir::is(product->inputs[0]->producer, "Exp") ? 0 : 1;
    const Node* powers = producer_of(product->inputs[side], "Exp");
    const Node* distances = powers == nullptr ? nullptr : producer_of(powers->inputs[0], "Sub");
    if (distances == nullptr || distances->inputs[0] != match.logsumexp->inputs[0]) return false;
    const Value* subtracted = distances->inputs[1];
    while (subtracted->producer != nullptr && keeps_elements(*subtracted->producer)) {
      found.nodes.push_back(subtracted->producer);
      subtracted = subtracted->producer->inputs[0];
    }
    Value* gradient = product->inputs[1 - side];
    if (subtracted != match.logsumexp->outputs[0] || !is_real(gradient)) return false;
    Shape rows = shape_of(*distances->outputs[0]);
    rows.back() = Dim(1);
    if (!(shape_of(*gradient) == rows)) return false;
    found.of_logsumexp = gradient;
    return true;
  }

  // One number that the gradients of rows are multiples of, and what they are multiplied by.
  bool find_gradients_of_rows(Match& match) const {
    const bool has_rows =
        match.form.reduction == ops::Reduction::kNone || match.form.has_all_rows();
    if (match.form.reduction == ops::Reduction::kNone || match.form.has_sums) {
      if (has_cut(match)) return false;
    }
    if (!has_rows) return true;
    match.multiples.emplace(graph_, memory_, *match.product);
    if (!match.backward) return can_stand_first(match);
    Backward& backward = *match.backward;
    for (const Value* number = backward.of_loss; number != nullptr;
         number = match.multiples->late_factor(number)) {
      if (!shape_of(*number).empty() || !are_multiples_of(match, number)) continue;
      backward.gradient = const_cast<Value*>(number);
      match.form.has_loss_grad = number != backward.of_loss;
      match.form.has_sums_grad = backward.of_sums != nullptr;
      match.form.has_square_grad = backward.of_logsumexp != nullptr;
      return can_stand_first(match);
    }
    return false;
  }

  static bool are_multiples_of(const Match& match, const Value* number) {
    using Degrees = Multiples::Degrees;
    const Backward& backward = *match.backward;
    const auto is_multiple = [&](const Value* value, const Degrees& degrees) {
      return value == nullptr ||
             match.multiples->degrees(value, factors_of(match, number)) == degrees;
    };
    return is_multiple(backward.of_loss, {1, 0}) && is_multiple(backward.of_sums, {1, 0}) &&
           is_multiple(backward.of_logsumexp, {1, 1});
  }

  // What goes into the node can be computed before the first of those that it replaces.
  static bool can_stand_first(const Match& match) {
    const std::vector<Value*> read = read_first(match);
    return std::all_of(read.begin(), read.end(), [&](const Value* value) {
      return match.multiples->can_stand_before(value, *match.first);
    });
  }

  static bool is_read_only_by(const Value* value, const Node* reader) {
    return value == nullptr ||
           std::all_of(value->uses.begin(), value->uses.end(),
                       [reader](const ir::Use& use) { return use.node == reader; });
  }

  // From the gradient of logits to all that is made of it. Nodes behind a sum with a gradient from
  // elsewhere stay for that one.
  bool follow(const Match& match, Value& gradient, bool is_sum, int stage, Backward& found) const {
    if (!is_real(&gradient) || memory_.is_written(&gradient)) return false;
    for (const ir::Use& use : gradient.uses) {
      if (!is_plain(use) || !is_backward(use.node)) return false;
      Node& node = *use.node;
      if (node.outputs.empty() || !is_real(node.outputs[0])) return false;
      const bool is_uncut =
          std::any_of(match.chain.begin(), match.chain.end(),
                      [&](const Node* made) { return is_gradient_of_cut(node, *made); });
      if (is_uncut || keeps_rows(node)) {
        if (!is_sum) found.nodes.push_back(&node);
        if (!follow(match, *node.outputs[0], is_sum, stage, found)) return false;
      } else if (use.index == 0 && is_uncapped(match, node, stage)) {
        if (stage == 1 && found.of_tanh != nullptr) return false;
        if (stage == 1) found.of_tanh = &node;
        if (!is_sum) found.nodes.push_back(&node);
        if (!follow(match, *node.outputs[0], is_sum, stage + 1, found)) return false;
      } else if (ir::is(&node, "Add")) {
        // The sum is all that is read of the gradient; it is that of logits with their cap.
        if (gradient.uses.size() != 1 || stage != 0) return false;
        if (find_gradient_of_logsumexp(match, node.inputs[1 - use.index], found)) {
          found.square = &node;
          found.square_index = use.index;
          if (!is_sum) found.nodes.push_back(&node);
          if (!follow(match, *node.outputs[0], is_sum, stage, found)) return false;
        } else if (!find_elsewhere(node, use.index, found) ||
                   !follow(match, *node.outputs[0], true, stage, found)) {
          return false;
        }
      } else if ((match.outer != nullptr && stage != 3) ||
                 !find_gradients(match, node, use.index, is_sum, found)) {
        return false;
      }
    }
    return true;
  }

  bool find_elsewhere(Node& node, int index, Backward& found) const {
    Value* other = node.inputs[1 - index];
    if (found.added != nullptr || found.has_any() || !(other->type == node.outputs[0]->type))
      return false;
    if (!ir::is(SharedMemory::root(other)->producer, "YieldOp", ir::kMicrosoftDomain)) return false;
    found.added = &node;
    found.elsewhere = other;
    return true;
  }

  bool find_gradients(const Match& match, Node& node, int index, bool is_sum,
                      Backward& found) const {
    if (is_sum != (found.added != nullptr)) return false;
    const auto is_product_with = [&](const Node& product, const Value* factor) {
      return ir::is(&product, "MatMul") && product.inputs[1] == factor &&
             lies_by_rows(*product.outputs[0]) && is_real(product.outputs[0]);
    };
    if (ir::is(&node, "MatMul")) {
      if (index != 0 || !is_turned(node.inputs[1], match.weight)) return false;
      if (!is_product_with(node, node.inputs[1])) return false;
      found.hidden.push_back(&node);
      return true;
    }
    if (swaps_last_dims(&node) && shape_of(*node.outputs[0]).size() == 2) {
      for (const ir::Use& use : node.outputs[0]->uses) {
        if (!is_plain(use) || use.index != 0 || !is_backward(use.node)) return false;
        Node& product = *use.node;
        if (!ir::is(&product, "MatMul") || rows_of(product.inputs[1]) != rows_of(match.hidden) ||
            !is_product_with(product, product.inputs[1])) {
          return false;
        }
        found.weight.push_back(&product);
      }
      if (!is_sum) found.nodes.push_back(&node);
      return true;
    }
    if (!ir::is(&node, "ReduceSum") || !match.form.has_bias || !lies_by_rows(*node.outputs[0])) {
      return false;
    }
    const auto axes = ops::reduction_axes(node);
    const size_t rank = shape_of(*node.inputs[0]).size();
    if (!axes || axes->size() + 1 != rank || axes->back() == static_cast<int64_t>(rank) - 1) {
      return false;
    }
    found.bias.push_back(&node);
    return true;
  }

  // ---- all of it

  // Other readers of logits come after the loss, where logits are then, and none in backward.
  bool find_other_readers(Match& match) const {
    const int position = positions_.at(match.first);
    std::unordered_set<const Node*> gone = {match.logsumexp};
    if (match.backward) gone.insert(match.backward->nodes.begin(), match.backward->nodes.end());
    const Node* next = match.softmax;
    if (match.backward && match.backward->of_tanh) gone.insert(match.backward->of_tanh);
    std::vector<Node*> made = match.chain;
    made.push_back(match.product);
    bool is_capped = true;
    for (const Node* node : made) {
      for (const ir::Use& use : node->outputs[0]->uses) {
        if (use.node == next || (use.node != nullptr && gone.contains(use.node))) continue;
        const bool is_output = use.node == nullptr;
        if (!is_output &&
            (is_backward(use.node) || use.index < 0 || positions_.at(use.node) < position)) {
          return false;
        }
        if (!is_capped) return false;
        match.form.has_logits = true;
      }
      if (node == match.outer) is_capped = false;
      next = node;
    }
    return true;
  }

  static bool has_no_tags(const Match& match) {
    const auto is_tagged = [](const Node* node) {
      return node != nullptr && !node->recompute.empty();
    };
    return !is_tagged(match.softmax) && !is_tagged(match.loss) && !is_tagged(match.product) &&
           !is_tagged(match.sums) && !is_tagged(match.weighting) && !is_tagged(match.logsumexp) &&
           std::none_of(match.chain.begin(), match.chain.end(), is_tagged);
  }

  bool pays(Match& match) const {
    const Value& logits = *match.softmax->inputs[0];
    const std::optional<int64_t> rows = hinted_size(graph_, rows_of_product(match));
    if (!rows) return false;
    const int64_t classes = shape_of(logits)[1].constant();
    const int64_t width = shape_of(*match.weight)[0].constant();
    const int64_t bytes = logits.type.dtype == DType::kDouble ? 8 : 4;
    ops::choose_chunks(match.form, classes, width, bytes);
    const int64_t of_logits = *rows * classes * ir::size_bytes(logits.type.dtype);
    const int64_t of_gradient = match.form.has_weight_grad ? classes * width * bytes : 0;
    return of_logits - of_gradient >= kLeastSaving;
  }

  const Graph& graph_;
  const KnownSizes sizes_;
  const SharedMemory memory_;
  const std::unordered_set<const Node*> backward_;
  std::unordered_map<const Node*, int> positions_;
};

class Rewriter {
 public:
  Rewriter(Graph& graph, Match& match)
      : graph_(graph),
        match_(match),
        form_(match.form),
        classes_(shape_of(*match.weight)[1]),
        width_(shape_of(*match.weight)[0]),
        sums_(match.hidden->type.dtype == DType::kDouble ? DType::kDouble : DType::kFloat) {}

  void run() {
    Node& made = write_loss();
    size_t next = 2;
    Value* logits = form_.has_logits ? made.outputs[next++] : nullptr;
    hand_over_rows(*made.outputs[0], *match_.loss);
    std::vector<Node*> gone = {match_.loss, match_.softmax};
    if (match_.backward) {
      Backward& backward = *match_.backward;
      note_rows_of_gradients(gone);
      gone.insert(gone.end(), backward.nodes.begin(), backward.nodes.end());
      if (backward.added != nullptr && match_.tanh != nullptr) write_tanh(*backward.of_tanh);
      if (backward.added != nullptr) {
        ir::replace_uses(*backward.added->outputs[0], *backward.elsewhere, graph_);
        gone.push_back(backward.added);
      }
      if (backward.square != nullptr && backward.added != nullptr) {
        ir::replace_uses(*backward.square->outputs[0],
                         *backward.square->inputs[static_cast<size_t>(backward.square_index)],
                         graph_);
        gone.push_back(backward.square);
      }
      for (const auto* nodes : {&backward.hidden, &backward.weight, &backward.bias}) {
        if (nodes->empty()) continue;
        Value* gradient = made.outputs[next++];
        for (Node* node : *nodes) {
          hand_over(*gradient, *node);
          gone.push_back(node);
        }
      }
    }
    for (Node* node : {match_.sums, match_.logsumexp}) {
      if (node == nullptr) continue;
      hand_over_rows(*made.outputs[next++], *node);
      gone.push_back(node);
    }
    if (match_.weighting != nullptr) gone.push_back(match_.weighting);
    hand_over_logits(logits, gone);
    erase_left(gone);
  }

 private:
  Node& write_loss() {
    if (match_.multiples) {
      for (const Value* value : read_first(match_)) {
        match_.multiples->move_before(graph_, value, *match_.first);
      }
    }
    ops::Writer write(graph_, match_.first);
    const Dim rows = rows_of_product(match_);
    Value* hidden = match_.hidden;
    if (shape_of(*hidden).size() != 2) hidden = write.reshape(hidden, {rows, width_});
    Value* weight = swaps_last_dims(match_.weight->producer)
                        ? match_.weight->producer->inputs[0]
                        : write.transpose(match_.weight, {1, 0});
    std::vector<Value*> inputs = {hidden, weight, write_labels(write, rows)};
    if (form_.has_bias) inputs.push_back(match_.bias);
    if (form_.has_class_weight) inputs.push_back(match_.class_weight);
    if (match_.backward) {
      const Backward& backward = *match_.backward;
      const Shape of_loss = shape_of(*match_.loss->outputs[0]);
      if (form_.has_loss_grad) inputs.push_back(write_multiple(write, backward.of_loss, of_loss));
      if (form_.has_sums_grad) inputs.push_back(write_multiple(write, backward.of_sums, {rows}));
      if (form_.has_square_grad) {
        inputs.push_back(write_multiple(write, backward.of_logsumexp, {rows}));
      }
    }
    std::vector<Type> types = {
        sums_of(shape_of(*match_.loss->outputs[0])),
        sums_of({ops::workspace_size(form_, classes_.constant(), width_.constant())})};
    if (form_.has_logits) {
      const Node* made = match_.outer == nullptr ? match_.product : match_.outer;
      types.push_back(ops::with_shape(made->outputs[0]->type, Shape{rows, classes_}));
    }
    if (form_.has_hidden_grad) types.push_back(sums_of({rows, width_}));
    if (form_.has_weight_grad) types.push_back(sums_of({classes_, width_}));
    if (form_.has_bias_grad) types.push_back(sums_of({classes_}));
    for (bool is_made : {form_.has_sums, form_.has_logsumexp}) {
      if (is_made) types.push_back(sums_of({rows}));
    }
    ir::Attrs attrs;
    ops::write(form_, attrs);
    return write.add({ir::kTorchOrtDomain, "LinearCrossEntropy"}, inputs, types, attrs);
  }

  // What a gradient is where the number that it is a multiple of is 1.
  Value* write_multiple(ops::Writer& write, const Value* gradient, const Shape& shape) const {
    const Value* number = match_.backward->gradient;
    Value* made = match_.multiples->write(write, gradient, factors_of(match_, number), sums_);
    return shape_of(*made) == shape ? made : write.reshape(made, shape);
  }

  // Nodes that nobody reads any more, once the gradients of rows are made without them.
  void note_rows_of_gradients(std::vector<Node*>& gone) const {
    if (!match_.multiples) return;
    const Backward& backward = *match_.backward;
    for (const Value* gradient : {backward.of_loss, backward.of_sums, backward.of_logsumexp}) {
      if (gradient == nullptr) continue;
      const auto parts =
          match_.multiples->parts_of(gradient, factors_of(match_, backward.gradient));
      gone.insert(gone.end(), parts.nodes.begin(), parts.nodes.end());
    }
  }

  // Of all rows of logits. Those that are cut off do not count.
  Value* write_labels(ops::Writer& write, const Dim& rows) const {
    Value* labels = match_.labels;
    for (const Node* node : match_.chain) {
      const std::optional<Cut> cut = cut_of(*node);
      if (!cut) continue;
      Shape shape = shape_of(*node->outputs[0]);
      shape.pop_back();
      if (!(shape_of(*labels) == shape)) labels = write.reshape(labels, shape);
      Shape pads(2 * shape.size(), Dim(0));
      pads[cut->axis] = cut->before;
      pads[shape.size() + cut->axis] = cut->after;
      Value& ignored =
          ir::add_initializer(graph_, "ignored", Type{.dtype = DType::kInt64, .shape = Shape{}},
                              ops::scalar_data(form_.ignore_index, DType::kInt64));
      labels = write.make("Pad", {labels, write.ints(pads), &ignored});
    }
    return shape_of(*labels).size() == 1 ? labels : write.reshape(labels, {rows});
  }

  Type sums_of(Shape shape) const {
    Type type = ops::with_shape(match_.hidden->type, std::move(shape));
    type.dtype = sums_;
    return type;
  }

  // For a gradient that logits have from elsewhere, which goes through the cap the old way.
  void write_tanh(Node& of_tanh) {
    ops::Writer write(graph_, &of_tanh);
    Value* made = write.again(*match_.product, match_.product->inputs).outputs[0];
    for (auto node = match_.chain.rbegin(); node != match_.chain.rend(); ++node) {
      std::vector<Value*> inputs = (*node)->inputs;
      inputs[slot_of_logits(**node)] = made;
      made = write.again(**node, inputs).outputs[0];
      if (*node == match_.tanh) break;
    }
    ir::set_input(of_tanh, 1, made);
  }

  // Numbers of rows, or one, in the place of those that `node` makes.
  void hand_over_rows(Value& numbers, Node& node) {
    ops::Writer write(graph_, match_.first);
    Value& old = *node.outputs[0];
    Value* made = write.cast(&numbers, old.type.dtype);
    if (!(shape_of(*made) == shape_of(old))) made = write.reshape(made, shape_of(old));
    ir::replace_uses(old, *made, graph_);
  }

  // What the node has made of the gradient of logits, or of a gradient that these have from
  // elsewhere, which the node makes from now on: then it stays, and both are added up.
  void hand_over(Value& gradient, Node& node) {
    Value& old = *node.outputs[0];
    const bool stays = match_.backward->added != nullptr;
    auto after = std::next(node.position);
    ops::Writer write(graph_, after == graph_.nodes.end() ? nullptr : &*after);
    Value* factor = write.cast(match_.backward->gradient, sums_);
    Value* made = write.cast(write.make("Mul", {&gradient, factor}), old.type.dtype);
    if (!(shape_of(*made) == shape_of(old))) made = write.reshape(made, shape_of(old));
    if (stays) made = write.make("Add", {made, &old});
    ir::replace_uses(old, *made, graph_);
    if (stays) ir::set_input(*made->producer, 1, &old);
  }

  // Those who read logits, or what was made of them on the way to the loss, read what is made of
  // the logits of the node in the same way.
  void hand_over_logits(Value* logits, const std::vector<Node*>& gone) {
    if (logits == nullptr) return;
    ops::Writer write(graph_, match_.first);
    Value& old = *match_.product->outputs[0];
    if (!(shape_of(*logits) == shape_of(old))) logits = write.reshape(logits, shape_of(old));
    std::vector<Node*> made(match_.chain.rbegin(), match_.chain.rend());
    std::vector<Value*> values = {logits};
    bool has_cap = match_.outer == nullptr;
    for (const Node* node : made) {
      const bool is_in_logits = !has_cap && (is_cast(*node) || node == match_.inner ||
                                             node == match_.tanh || node == match_.outer);
      has_cap |= node == match_.outer;
      std::vector<Value*> inputs = node->inputs;
      inputs[0] = values.back();
      values.push_back(is_in_logits ? values.back() : write.again(*node, inputs).outputs[0]);
    }
    erase_left(gone);
    for (size_t i = made.size(); i-- > 0;) {
      if (made[i]->is_erased()) continue;
      ir::replace_uses(*made[i]->outputs[0], *values[i + 1], graph_);
      ir::erase(graph_, *made[i]);
    }
    ir::replace_uses(old, *values[0], graph_);
    ir::erase(graph_, *match_.product);
  }

  void erase_left(std::vector<Node*> nodes) {
    nodes.insert(nodes.end(), match_.chain.begin(), match_.chain.end());
    nodes.push_back(match_.product);
    erase_unread(graph_, nodes);
  }

  Graph& graph_;
  Match& match_;
  const ops::LinearLoss& form_;
  const Dim classes_, width_;
  const DType sums_;
};

}  // namespace

int chunk_losses(Graph& graph) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !ir::is(&node, "LogSoftmax")) continue;
    std::optional<Match> match = Matcher(graph).find(node);
    if (!match) continue;
    if (!may_rewrite()) break;
    Rewriter(graph, *match).run();
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
