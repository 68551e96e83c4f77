#include "passes/loss_match.h"

#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/formula.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/attention_words.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/loss_words.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes::losses {

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

// The least memory to save: that of the logits less that of the gradient of the weight, which is
// live from the forward half on. Measured, chunks took 0.95 to 1.01 of the time of the usual nodes
// for 8,000 to 32,000 classes (saving 8 to 55 MiB), but 1.1 to 1.2 of it for 320 rows of 128,000
// classes (saving 31 MiB), because each chunk of few rows reads the weight and its gradient again.
constexpr int64_t kLeastSaving = 32 << 20;

class Matcher {
 public:
  explicit Matcher(const Graph& graph)
      : graph_(graph), sizes_(graph), memory_(graph), backward_(backward_nodes(graph)) {
    int position = 0;
    for (const Node& node : graph.nodes) positions_[&node] = position++;
  }

  std::optional<Match> find(Node& softmax) const {
    if (!ir::is(&softmax, "LogSoftmax") || backward_.contains(&softmax)) return std::nullopt;
    if (!is_fusible_float(softmax.inputs[0]) || !is_fusible_float(softmax.outputs[0]))
      return std::nullopt;
    const Value& logits = *softmax.inputs[0];
    const int64_t axis = ir::int_attr(softmax.attrs, "axis", -1);
    if (shape_of(logits).size() != 2 || (axis != 1 && axis != -1)) return std::nullopt;
    if (!sizes_.are_known(logits) || !shape_of(logits)[1].is_constant()) return std::nullopt;
    Match match{.softmax = &softmax};
    const bool is_found = find_loss(match) && find_product(match) && find_logsumexp(match) &&
                          find_backward(match) && find_gradients_of_rows(match) &&
                          find_other_readers(match) && has_no_tags(match) &&
                          (!match.uses_library || fits_library(match)) && pays(match);
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
      const bool is_loss = losses::is_loss(*use.node);
      if ((is_loss ? match.loss : match.sums) != nullptr) return false;
      if (is_loss) {
        match.loss = use.node;
      } else if (!find_sums(match, *use.node)) {
        return false;
      }
    }
    if (match.loss == nullptr) return false;
    const LossCall call = decode_loss(*match.loss);
    match.labels = call.labels;
    match.class_weight = call.class_weight;
    if (call.logarithms != match.softmax->outputs[0]) return false;
    const Value* weight = match.class_weight;
    if (weight != nullptr && (!is_fusible_float(weight) || shape_of(*weight).size() != 1))
      return false;
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
    match.form.reduction = call.reduction;
    match.form.ignore_index = call.ignore_index;
    return true;
  }

  // Finds the sum of a row's log-probabilities, or of these times weights of the classes.
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
    if (!is_fusible_float(node.inputs[0]) || !is_fusible_float(node.outputs[0])) return false;
    const auto last = static_cast<int64_t>(shape_of(*node.inputs[0]).size()) - 1;
    return ops::reduction_axes(node) == std::vector<int64_t>{last};
  }

  static Value* factor_of(const Match& match) {
    const auto& inputs = match.weighting->inputs;
    return inputs[inputs[0] == match.softmax->outputs[0] ? 1 : 0];
  }

  // Finds the logsumexp of the input of the softmax, or of a value that this input is a view or
  // cast of, up to a slice of rows.
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
    if (!has_kernel(match)) return false;
    if (!is_fusible_float(match.hidden) || !is_fusible_float(match.weight) ||
        !is_fusible_float(value))
      return false;
    const Shape &rows = shape_of(*match.hidden), &weight = shape_of(*match.weight);
    if (rows.size() < 2 || weight.size() != 2 || !weight[0].is_constant()) return false;
    if (match.hidden->type.dtype != match.weight->type.dtype || !sizes_.are_known(*match.hidden)) {
      return false;
    }
    const bool is_double = match.hidden->type.dtype == DType::kDouble;
    if (is_double != (match.softmax->outputs[0]->type.dtype == DType::kDouble)) return false;
    if (is_gemm && ops::has_input(*product, 2)) {
      match.bias = product->inputs[2];
      if (!is_fusible_float(match.bias) || !(shape_of(*match.bias) == Shape{weight[1]}))
        return false;
      match.form.has_bias = true;
    }
    for (const Value* each : {match.hidden, match.weight, match.bias, match.labels,
                              match.class_weight, product->outputs[0]}) {
      if (each != nullptr && memory_.is_written(each)) return false;
    }
    return true;
  }

  // Where the device's library multiplies, short floats need gradients in float32, ...
  static bool has_kernel(Match& match) {
    const region::KernelRow* row = region::kernel_for(match.hidden, "LinearCrossEntropy");
    if (row == nullptr) return false;
    match.uses_library = row->uses_library;
    const DType dtype = match.hidden->type.dtype;
    return !match.uses_library || dtype == ops::computed_dtype(dtype) ||
           region::has_wide_products(match.hidden);
  }

  // ... a bias of the dtype of the factors, and weights of classes that are no wider than the sums.
  // Gradients of float16 are computed far larger than they are, by a factor that is known for means
  // and sums alone.
  static bool fits_library(const Match& match) {
    const DType dtype = match.hidden->type.dtype, sums = ops::computed_dtype(dtype);
    const Value* weight = match.class_weight;
    if (match.bias != nullptr && match.bias->type.dtype != dtype) return false;
    if (weight != nullptr && weight->type.dtype == DType::kDouble && sums != DType::kDouble) {
      return false;
    }
    const ops::LinearLoss& form = match.form;
    return dtype != DType::kHalf ||
           !(form.has_loss_grad || form.has_sums_grad || form.has_square_grad);
  }

  // Finds a soft cap, factor * tanh(logits / factor), perhaps with casts in between.
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

  // Whether the node is the next step of a gradient through a soft cap, after `stage` steps of it.
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
    if (has_count(*match.loss) && !is_read_only_by(match.loss->outputs[1], of_loss)) return false;
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
                      of_loss->outputs[0]->uses.size() == 1 && is_fusible_float(found.gradient) &&
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

  // Finds the sum of two gradients of the log-probabilities: that of the labelled ones, and that of
  // all of them. The latter is one number for each row, or this times weights of the classes.
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
    if (!ir::is(expand, "Expand") || !is_fusible_float(expand->inputs[0])) return false;
    if (!(shape_of(*value) == shape_of(*match.softmax->outputs[0]))) return false;
    const Shape& rows = shape_of(*expand->inputs[0]);
    if (rows.size() != 2 || !(rows[1] == Dim(1)) || !(rows[0] == shape_of(*value)[0])) return false;
    found.nodes.push_back(expand);
    found.of_sums = expand->inputs[0];
    return true;
  }

  // Finds the gradient that comes through logsumexp: the gradient of logsumexp times the
  // probabilities.
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
    if (subtracted != match.logsumexp->outputs[0] || !is_fusible_float(gradient)) return false;
    Shape rows = shape_of(*distances->outputs[0]);
    rows.back() = Dim(1);
    if (!(shape_of(*gradient) == rows)) return false;
    found.of_logsumexp = gradient;
    return true;
  }

  // Finds one number of which the gradients of all rows are multiples, and their factors.
  bool find_gradients_of_rows(Match& match) const {
    const bool has_rows =
        match.form.reduction == ops::Reduction::kNone || match.form.has_all_rows();
    if (!has_rows) return true;
    match.multiples.emplace(graph_, memory_, *match.product);
    if (!match.backward) return can_stand_first(match);
    Backward& backward = *match.backward;
    for (const Value* number = backward.of_loss; number != nullptr;
         number = match.multiples->dependent_factor(number)) {
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

  // Whether the operands of the new node can be computed before the first of the nodes that it
  // replaces.
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

  // Follows the gradient of the logits to the gradients of the rows, the weight and the bias. If a
  // gradient from elsewhere is added on the way, the nodes after the sum stay, to compute that one.
  bool follow(const Match& match, Value& gradient, bool is_sum, int stage, Backward& found) const {
    if (!is_fusible_float(&gradient) || memory_.is_written(&gradient)) return false;
    for (const ir::Use& use : gradient.uses) {
      if (!is_plain(use) || !is_backward(use.node)) return false;
      Node& node = *use.node;
      if (node.outputs.empty() || !is_fusible_float(node.outputs[0])) return false;
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
        // The sum must be the only reader of the gradient, and the gradient must be that of the
        // logits with their cap.
        if (gradient.uses.size() != 1 || stage != 0) return false;
        if (find_both(match, node, use.index, found)) {
          if (!follow(match, *node.outputs[0], true, stage, found)) return false;
        } else if (find_gradient_of_logsumexp(match, node.inputs[1 - use.index], found)) {
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

  // Finds the case that a gradient from elsewhere and the one through logsumexp were added to each
  // other first.
  bool find_both(const Match& match, Node& node, int index, Backward& found) const {
    Node* sum = node.inputs[1 - index]->producer;
    if (!ir::is(sum, "Add") || !is_backward(sum) || sum->outputs[0]->uses.size() != 1) return false;
    for (int side : {0, 1}) {
      if (!is_from_border(sum->inputs[side])) continue;
      if (found.added != nullptr || found.has_any() ||
          !(sum->inputs[side]->type == node.outputs[0]->type)) {
        return false;
      }
      found.nodes.push_back(sum);
      if (!find_gradient_of_logsumexp(match, sum->inputs[1 - side], found)) return false;
      found.added = &node;
      found.elsewhere = sum->inputs[side];
      return true;
    }
    return false;
  }

  // Whether the value is a gradient that enters at the border, or a view or cast of one.
  bool is_from_border(const Value* value) const {
    while (value->producer != nullptr && is_backward(value->producer) &&
           keeps_rows(*value->producer)) {
      value = value->producer->inputs[0];
    }
    return is_border(SharedMemory::root(value)->producer);
  }

  bool find_elsewhere(Node& node, int index, Backward& found) const {
    Value* other = node.inputs[1 - index];
    if (found.added != nullptr || found.has_any() || !(other->type == node.outputs[0]->type))
      return false;
    if (!is_from_border(other)) return false;
    found.added = &node;
    found.elsewhere = other;
    return true;
  }

  bool find_gradients(const Match& match, Node& node, int index, bool is_sum,
                      Backward& found) const {
    if (is_sum != (found.added != nullptr)) return false;
    const auto is_product_with = [&](const Node& product, const Value* factor) {
      return ir::is(&product, "MatMul") && product.inputs[1] == factor &&
             lies_by_rows(*product.outputs[0]) && is_fusible_float(product.outputs[0]);
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

  // ---- conditions on the whole match

  // Other readers of the logits must come after the loss, since the new node is there, and must not
  // be in the backward half.
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
    if (match.uses_library) {
      ops::choose_library_chunks(match.form, *rows, classes, match.hidden->type.dtype);
    } else {
      ops::choose_chunks(match.form, classes, width, bytes);
    }
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

}  // namespace

std::optional<Match> find_loss(const Graph& graph, Node& softmax) {
  return Matcher(graph).find(softmax);
}

Multiples::Factors factors_of(const Match& match, const Value* number) {
  return {number, match.logsumexp == nullptr ? nullptr : match.logsumexp->outputs[0]};
}

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
    const auto independent =
        match.multiples->parts_of(gradient, factors_of(match, backward.gradient)).independent;
    read.insert(read.end(), independent.begin(), independent.end());
  }
  return read;
}

Dim rows_of_product(const Match& match) {
  Shape rows = shape_of(*match.product->outputs[0]);
  rows.pop_back();
  return ir::numel(rows);
}

}  // namespace torch_ort::passes::losses
