#include "passes/attention_match.h"

#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/dropout.h"
#include "region/codegen.h"

#include <algorithm>

namespace torch_ort::passes::attention {

namespace {

using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Value;

class Matcher {
 public:
  explicit Matcher(const Scope& scope) : scope_(scope) {}

  std::optional<Match> find(Node& node) const {
    if (node.is_erased() || scope_.backward.contains(&node) || node.inputs.empty())
      return std::nullopt;
    const std::optional<bool> is_safe = softmax_kind(node);
    if (!is_safe) return std::nullopt;
    const Value &x = *node.inputs[0], &y = *node.outputs[0];
    if (!is_fusible_float(&x) || !is_fusible_float(&y) || !scope_.sizes.are_known(x))
      return std::nullopt;
    Match match{.softmax = &node, .is_safe = *is_safe, .shape = shape_of(x)};
    const size_t rank = match.shape.size();
    if (rank != 3 && rank != 4) return std::nullopt;
    // The engine's kernel gives each head to one thread. With a single head, PyTorch's products are
    // faster, because they use all threads.
    if (hinted_size(scope_.graph, ir::numel(leading(match.shape))) == 1) return std::nullopt;
    const auto scores = find_scores(node.inputs[0], match.shape, false, false);
    const auto weights = find_weights(node.outputs[0], match.shape);
    if (!scores || !weights || !find_operands(match, *scores, *weights)) return std::nullopt;
    match.scores = *scores;
    match.weights = *weights;
    if (!find_backward(match) || !are_alone(match) || !has_one_tag(match)) return std::nullopt;
    return match;
  }

 private:
  // ---- the forward half

  // Nothing if the node is no softmax over the last dim. Else whether it gives zeros for a row
  // whose scores are all -inf.
  static std::optional<bool> softmax_kind(const Node& node) {
    const bool is_standard = ir::is(&node, "Softmax");
    const bool is_safe = ops::key_of(node) == ops::aten::kSafeSoftmax;
    if ((!is_standard && !is_safe) || !node.inputs[0] || !node.inputs[0]->type.shape) return {};
    const auto rank = static_cast<int64_t>(node.inputs[0]->type.shape->size());
    const int64_t axis = ir::int_attr(node.attrs, is_standard ? "axis" : "dim", -1);
    if (axis != -1 && axis != rank - 1) return {};
    return is_safe;
  }

  // Walks from the input of the softmax up to the product of queries and keys. A program scales the
  // scores before it masks them, so no mask may be found above a scale.
  static std::optional<Scores> find_scores(Value* value, const Shape& shape, bool is_masked,
                                           bool is_scaled) {
    Node* node = value->producer;
    if (node == nullptr || !is_fusible_float(value)) return std::nullopt;
    std::optional<Scores> found;
    const bool has_shape = shape_of(*value) == shape;
    if (ir::is(node, "MatMul")) {
      found.emplace().product = node;
    } else if (keeps_elements(*node)) {
      found = find_scores(node->inputs[0], shape, is_masked, is_scaled);
    } else if (const auto scaled = multiple(*node)) {
      found = find_scores(scaled->of, shape, is_masked, true);
      if (found) found->scale *= scaled->factor;
    } else if (is_masked || is_scaled || !has_shape) {
      return std::nullopt;
    } else if (const auto hidden = filled(*node)) {
      found = find_scores(hidden->of, shape, true, false);
      if (found) found->filled = hidden;
    } else if (ir::is(node, "Add")) {
      for (size_t side : {0, 1}) {
        Value* rest = node->inputs[side];
        if (!is_fusible_float(rest) || !(shape_of(*rest) == shape)) continue;
        found = find_scores(rest, shape, true, false);
        if (!found) continue;
        found->added = node->inputs[1 - side];
        break;
      }
    }
    if (found) found->nodes.push_back(node);
    return found;
  }

  // Walks from the result of the softmax down to the product of weights and values.
  std::optional<Weights> find_weights(Value* value, const Shape& shape) const {
    Weights found;
    while (found.product == nullptr) {
      found.values.push_back(value);
      Node* reader = only_reader(*value, false);
      if (reader == nullptr || reader->inputs[0] != value) return std::nullopt;
      if (ir::is(reader, "MatMul")) {
        found.product = reader;
      } else if (ir::is(reader, "Dropout") && found.dropout == nullptr) {
        const std::optional<double> ratio = dropout_ratio(*reader);
        if (!ratio || !(shape_of(*value) == shape)) return std::nullopt;
        found.dropout = reader;
        found.keep = 1 - *ratio;
      } else if (!keeps_elements(*reader)) {
        return std::nullopt;
      }
      found.nodes.push_back(reader);
      value = reader->outputs[0];
      if (!is_fusible_float(value)) return std::nullopt;
    }
    return found;
  }

  // The only reader of `value` in one of the halves; nullptr if there is none, more than one, or
  // one that is no node's plain input.
  Node* only_reader(const Value& value, bool in_backward) const {
    Node* found = nullptr;
    for (const ir::Use& use : value.uses) {
      const bool is_plain = use.node != nullptr && use.index >= 0;
      if (is_plain && scope_.backward.contains(use.node) != in_backward) continue;
      if (!is_plain || found != nullptr) return nullptr;
      found = use.node;
    }
    return found;
  }

  // Whether the kernel supports the factors of both products and the mask.
  bool find_operands(Match& match, const Scores& scores, const Weights& weights) const {
    match.query = {scores.product->inputs[0], nullptr, false};
    match.key = {scores.product->inputs[1], nullptr, true};
    match.value = {weights.product->inputs[1], nullptr, false};
    Value* first = match.query.value;
    for (const Value* value : {first, match.key.value, match.value.value}) {
      if (!region::has_kernel(value, "Attention") || !is_fusible_float(value)) return false;
      if (!scope_.sizes.are_known(*value)) return false;
      if (value->type.dtype != first->type.dtype || shape_of(*value).size() < 3) return false;
    }
    const Shape &query = shape_of(*first), &key = shape_of(*match.key.value);
    const Shape& value = shape_of(*match.value.value);
    const Dim &queries = last(match.shape, 2), &keys = last(match.shape, 1);
    const Dim& features = last(query, 1);
    const Shape &inner = shape_of(*scores.product->outputs[0]),
                &outer = shape_of(*weights.product->inputs[0]);
    const bool fits =
        query == with_matrix(inner, queries, features) &&
        key == with_matrix(inner, features, keys) && value == with_matrix(outer, keys, features) &&
        inner == with_matrix(inner, queries, keys) && outer == with_matrix(outer, queries, keys) &&
        weights.product->outputs[0]->type.dtype == first->type.dtype;
    return fits && ir::numel(leading(inner)) == ir::numel(leading(match.shape)) &&
           is_wide_enough(match, *first) && fits_mask(match, scores);
  }

  // The kernel computes in float64 only if its operands are float64. So a program whose softmax is
  // wider than its operands is left as it is.
  static bool is_wide_enough(const Match& match, const Value& query) {
    return query.type.dtype == DType::kDouble ||
           (match.softmax->inputs[0]->type.dtype != DType::kDouble &&
            match.softmax->outputs[0]->type.dtype != DType::kDouble);
  }

  bool fits_mask(const Match& match, const Scores& scores) const {
    if (!scores.is_masked()) return true;
    const Value* mask = scores.filled ? scores.filled->condition : scores.added;
    if (!mask->type.is_known() || !scope_.sizes.are_known(*mask)) return false;
    const Shape& shape = shape_of(*mask);
    if (shape.size() > match.shape.size()) return false;
    for (size_t i = 1; i <= shape.size(); ++i) {
      if (!(last(shape, i) == Dim(1)) && !(last(shape, i) == last(match.shape, i))) return false;
    }
    if (!region::takes(mask)) return false;
    if (scores.filled) return mask->type.dtype == DType::kBool;
    const bool is_double = match.query.value->type.dtype == DType::kDouble;
    return is_fusible_float(mask) && (mask->type.dtype == DType::kDouble) == is_double;
  }

  // ---- the backward half

  // False if backward reads a value that the kernel does not compute.
  bool find_backward(Match& match) const {
    Backward found;
    Node *softmax = nullptr, *product = nullptr;
    for (Value* value : match.weights.values) {
      for (const ir::Use& use : value->uses) {
        if (use.node == nullptr || !scope_.backward.contains(use.node)) continue;
        if (ops::key_of(*use.node) == ops::aten::kSoftmaxBackward && softmax == nullptr &&
            value == match.softmax->outputs[0] && use.index == 1) {
          softmax = use.node;
        } else if (swaps_last_dims(use.node) && product == nullptr) {
          product = only_reader(*use.node->outputs[0], true);
          if (!ir::is(product, "MatMul") || product->inputs[0] != use.node->outputs[0])
            return false;
          found.nodes.push_back(use.node);
          found.nodes.push_back(product);
        } else {
          return false;
        }
      }
    }
    if (softmax == nullptr) return product == nullptr;
    found.nodes.push_back(softmax);
    if (!find_above(match, *softmax, found) || !find_below(match, *softmax, found)) return false;
    if (product != nullptr) {
      if (product->inputs[1] != found.gradient) return false;
      found.value = product->outputs[0];
    }
    match.query.gradient = found.query;
    match.key.gradient = found.key;
    match.value.gradient = found.value;
    match.backward = std::move(found);
    return true;
  }

  // Walks from the gradient of the softmax up to the product of the gradient of the result and the
  // values.
  bool find_above(const Match& match, Node& softmax, Backward& found) const {
    const ops::Call call = ops::decode_aten(softmax);
    const auto* dim = std::get_if<Dim>(&call.args.at(2).value);
    if (dim == nullptr ||
        !(*dim == Dim(-1) || *dim == Dim(static_cast<int64_t>(match.shape.size()) - 1))) {
      return false;
    }
    bool has_dropout = match.weights.dropout == nullptr;
    for (Value* value = softmax.inputs[0]; value != nullptr && value->producer != nullptr;) {
      Node& node = *value->producer;
      if (!scope_.backward.contains(&node)) return false;
      found.nodes.push_back(&node);
      if (ir::is(&node, "MatMul")) {
        Node* transpose = node.inputs[1]->producer;
        if (!swaps_last_dims(transpose) || transpose->inputs[0] != match.value.value) return false;
        found.nodes.push_back(transpose);
        found.gradient = node.inputs[0];
        return has_dropout && is_fusible_float(found.gradient) &&
               found.gradient->type.dtype == match.value.value->type.dtype;
      }
      if (ops::key_of(node) == ops::aten::kDropoutBackward && !has_dropout) {
        const ops::Call undo = ops::decode_aten(node);
        const auto* scale = std::get_if<double>(&undo.args.at(2).value);
        if (node.inputs[1] != match.weights.dropout->outputs[1] || scale == nullptr ||
            !are_close(*scale * match.weights.keep, 1)) {
          return false;
        }
        has_dropout = true;
      } else if (!keeps_elements(node)) {
        return false;
      }
      value = node.inputs[0];
    }
    return false;
  }

  // Walks from the gradient of the softmax down to the products with queries and keys.
  bool find_below(const Match& match, Node& softmax, Backward& found) const {
    return find_products(match, *softmax.outputs[0], 1, !match.scores.filled.has_value(), found);
  }

  // `value` is the gradient of the softmax times `scale`, with zeros where the forward half has
  // filled scores, if `is_filled`.
  bool find_products(const Match& match, Value& value, double scale, bool is_filled,
                     Backward& found) const {
    const bool may_be_read =
        found.scores == nullptr && is_filled && scale == 1 && is_gradient_of_scores(match, value);
    if (ends_in_products(match, value, may_be_read, found)) {
      return is_filled && are_close(scale, match.scores.scale);
    }
    if (value.uses.size() > 1 && !may_be_read) return false;
    for (const ir::Use& use : value.uses) {
      Backward trial = found;
      if (value.uses.size() > 1) trial.scores = &value;
      if (!leads_to_products(match, value, use, scale, is_filled, trial)) continue;
      found = std::move(trial);
      return true;
    }
    return false;
  }

  // Whether the reader is on the way from `value` to the products.
  bool leads_to_products(const Match& match, const Value& value, const ir::Use& use, double scale,
                         bool is_filled, Backward& found) const {
    Node* node = use.node;
    if (node == nullptr || use.index < 0 || !scope_.backward.contains(node)) return false;
    if (node->outputs[0] == nullptr || !is_fusible_float(node->outputs[0])) return false;
    found.nodes.push_back(node);
    if (const auto scaled = multiple(*node); scaled && scaled->of == &value) {
      scale *= scaled->factor;
    } else if (const auto zeros = filled(*node); zeros && !is_filled && zeros->of == &value) {
      const Filled& wanted = *match.scores.filled;
      if (zeros->number != 0 || zeros->condition != wanted.condition ||
          zeros->where_true != wanted.where_true) {
        return false;
      }
      is_filled = true;
    } else if (!keeps_elements(*node)) {
      return false;
    }
    return find_products(match, *node->outputs[0], scale, is_filled, found);
  }

  // Whether the kernel can write this gradient: it computes in float64 only if its operands are.
  static bool is_gradient_of_scores(const Match& match, const Value& value) {
    const bool is_double = match.query.value->type.dtype == DType::kDouble;
    return shape_of(value) == match.shape && !value.type.strides &&
           (value.type.dtype == DType::kDouble) == is_double;
  }

  // Whether the products that give the gradients of queries and keys read `value`, and no other
  // node does, unless it `may_be_read`.
  bool ends_in_products(const Match& match, Value& value, bool may_be_read, Backward& found) const {
    Value *query = nullptr, *key = nullptr;
    bool is_read = false;
    Nodes nodes;
    for (const ir::Use& use : value.uses) {
      Node* transpose = ir::is(use.node, "MatMul") && use.index >= 0
                            ? use.node->inputs[1 - use.index]->producer
                            : nullptr;
      const Value* factor = swaps_last_dims(transpose) ? transpose->inputs[0] : nullptr;
      if (use.index == 0 && factor == match.key.value && query == nullptr) {
        query = use.node->outputs[0];
      } else if (use.index == 1 && factor == match.query.value && key == nullptr) {
        key = use.node->outputs[0];
      } else if (may_be_read) {
        is_read = true;
        continue;
      } else {
        return false;
      }
      nodes.insert(nodes.end(), {transpose, use.node});
    }
    if (query == nullptr && key == nullptr) return false;
    found.query = query;
    found.key = key;
    if (is_read) found.scores = &value;
    found.nodes.insert(found.nodes.end(), nodes.begin(), nodes.end());
    return true;
  }

  // ---- whether other nodes read what would be removed

  static bool are_alone(const Match& match) {
    const Nodes nodes = nodes_of(match);
    const std::unordered_set<const Node*> inside(nodes.begin(), nodes.end());
    std::unordered_set<const Value*> results = {match.weights.product->outputs[0]};
    if (match.backward) {
      results.insert({match.backward->query, match.backward->key, match.backward->value,
                      match.backward->scores});
    }
    for (const Node* node : nodes) {
      // A transposed factor is not a part of the match: it stays if other nodes read it.
      if (swaps_last_dims(node) && !inside.contains(node->inputs[0]->producer)) continue;
      for (const Value* output : node->outputs) {
        if (output == nullptr || results.contains(output)) continue;
        for (const ir::Use& use : output->uses) {
          if (use.index < 0 || !inside.contains(use.node)) return false;
        }
      }
    }
    return true;
  }

  // Recomputation must take all nodes of the match or none, since they become one node.
  static bool has_one_tag(const Match& match) {
    const Node& first = *match.softmax;
    const auto is_same = [&](const Node* node) {
      return node->recompute == first.recompute && node->checkpoint == first.checkpoint;
    };
    return std::all_of(match.scores.nodes.begin(), match.scores.nodes.end(), is_same) &&
           std::all_of(match.weights.nodes.begin(), match.weights.nodes.end(), is_same);
  }

  const Scope& scope_;
};

}  // namespace

Nodes nodes_of(const Match& match) {
  Nodes nodes = match.scores.nodes;
  nodes.push_back(match.softmax);
  nodes.insert(nodes.end(), match.weights.nodes.begin(), match.weights.nodes.end());
  if (match.backward) {
    nodes.insert(nodes.end(), match.backward->nodes.begin(), match.backward->nodes.end());
  }
  return nodes;
}

std::optional<Match> find_attention(const Scope& scope, Node& softmax) {
  return Matcher(scope).find(softmax);
}

}  // namespace torch_ort::passes::attention
