// Attention that a program writes out -> torch_ort.Attention, and its backward nodes ->
// torch_ort.AttentionGrad:
//
//   MatMul(Dropout(Softmax(Where(mask, c, MatMul(q, Transpose(k)) * s) + mask)), v)
//
// That is what PyTorch's own attention becomes where its fused kernel takes no dropout, and what
// models write by hand. It is looked for in the graph and not in calls, so that both are found,
// whoever captured them. The engine's kernel (cpu/attention.cpp) holds scores a block at a time,
// so that no matrix of them crosses to the backward half.
//
// Declines where anything else reads what stands between: scores or probabilities that leave, a
// mask that has a gradient. And for one head alone.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/memory.h"
#include "passes/pass.h"

#include "region/codegen.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using Nodes = std::vector<Node*>;

const Shape& shape_of(const Value& value) { return *value.type.shape; }

// A dim that is counted from the back.
const Dim& last(const Shape& shape, size_t i) { return shape[shape.size() - i]; }

Shape with_matrix(const Shape& shape, const Dim& rows, const Dim& columns) {
  Shape result(shape.begin(), shape.end() - 2);
  result.insert(result.end(), {rows, columns});
  return result;
}

Shape leading(const Shape& shape) { return Shape(shape.begin(), shape.end() - 2); }

// Whether the result has the elements of the first input, in their order.
bool keeps_elements(const Node& node) {
  if (!node.op.domain.empty() || node.inputs.empty() || !is_real(node.inputs[0])) return false;
  if (!is_real(node.outputs.at(0))) return false;
  if (ir::is(&node, "Expand")) return shape_of(*node.inputs[0]) == shape_of(*node.outputs[0]);
  return ops::work_of(node).keeps_elements;
}

// The order of dims in which the last two have changed places.
Shape swapped_order(size_t rank) {
  Shape order;
  for (size_t i = 0; i < rank; ++i) order.push_back(static_cast<int64_t>(i));
  std::swap(order[rank - 2], order[rank - 1]);
  return order;
}

bool swaps_last_dims(const Node* node) {
  if (!ir::is(node, "Transpose")) return false;
  const Shape order = ir::ints_attr(node->attrs, "perm", {});
  return order.size() >= 2 && order == swapped_order(order.size());
}

struct Multiple {
  Value* of;
  double factor;
};

// A product with a number that is known.
std::optional<Multiple> multiple(const Node& node) {
  const bool is_quotient = ir::is(&node, "Div");
  if (!is_quotient && !ir::is(&node, "Mul")) return std::nullopt;
  for (size_t side : {0, 1}) {
    Value *rest = node.inputs[side], *number = node.inputs[1 - side];
    if (is_quotient && side == 1) break;
    const std::optional<double> factor = ops::known_double(number);
    if (!factor || *factor == 0 || !is_real(rest) || !is_real(node.outputs[0])) continue;
    if (!(shape_of(*rest) == shape_of(*node.outputs[0]))) continue;
    return Multiple{rest, is_quotient ? 1 / *factor : *factor};
  }
  return std::nullopt;
}

// A number for all elements where a condition holds.
struct Filled {
  Value *of, *condition;
  double number;
  bool where_true;  // else where the condition is false
};

std::optional<Filled> filled(const Node& node) {
  if (!ir::is(&node, "Where")) return std::nullopt;
  for (bool where_true : {true, false}) {
    Value *number = node.inputs[where_true ? 1 : 2], *rest = node.inputs[where_true ? 2 : 1];
    const std::optional<double> known = ops::known_double(number);
    if (!known || !is_real(rest) || !is_real(node.outputs[0])) continue;
    if (!(shape_of(*rest) == shape_of(*node.outputs[0]))) continue;
    return Filled{rest, node.inputs[0], *known, where_true};
  }
  return std::nullopt;
}

// Numbers of a program come from roundings of their own.
bool are_close(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

// 0 where a key stands at the query's place or before it, else -inf, for scores of that shape.
bool is_causal_mask(const Value& mask, const Shape& scores) {
  const Shape& shape = shape_of(mask);
  const bool is_whole =
      shape.size() >= 2 && last(shape, 1) == last(scores, 1) && last(shape, 2) == last(scores, 2);
  if (!is_whole || mask.producer == nullptr) return false;
  const Node& where = *mask.producer;
  if (!ir::is(&where, "Where") || ops::known_double(where.inputs[1]) != 0.0 ||
      ops::known_double(where.inputs[2]) != -std::numeric_limits<double>::infinity()) {
    return false;
  }
  const Node* triangle = where.inputs[0]->producer;
  if (!ir::is(triangle, "Trilu") || ir::int_attr(triangle->attrs, "upper", 1) != 0) return false;
  if (ops::has_input(*triangle, 1) && ops::known_double(triangle->inputs[1]) != 0.0) return false;
  const Node* ones = triangle->inputs[0]->producer;
  if (!ir::is(ones, "ConstantOfShape")) return false;
  const auto element = ones->attrs.find("value");
  if (element == ones->attrs.end()) return false;
  const auto* data = std::get_if<std::shared_ptr<const ir::TensorData>>(&element->second);
  return data != nullptr && (*data)->dtype == DType::kBool && (*data)->bytes[0] != std::byte(0);
}

// From the product of queries and keys to the softmax.
struct Scores {
  Node* product = nullptr;
  double scale = 1;
  Value* added = nullptr;
  std::optional<Filled> filled;
  Nodes nodes;

  bool is_masked() const { return added != nullptr || filled.has_value(); }
};

// From the softmax to the product with values.
struct Weights {
  Node *product = nullptr, *dropout = nullptr;
  double keep = 1;
  std::vector<Value*> values;
  Nodes nodes;
};

// From the gradient of the result to those of the factors of both products, as the products get
// them.
struct Backward {
  Value* gradient = nullptr;
  Value *query = nullptr, *key = nullptr, *value = nullptr;  // nullptr: nobody wants it
  Nodes nodes;
};

// A factor of a product, or what the program made it from, and the gradient of that.
struct Operand {
  Value *value, *gradient;
  bool is_transposed;  // features stand before keys
};

struct Match {
  Node* softmax;
  bool is_safe;
  Shape shape;  // of the scores, [..., queries, keys]
  Scores scores;
  Weights weights;
  std::optional<Backward> backward;
  Operand query, key, value;
};

class AttentionFusion {
 public:
  explicit AttentionFusion(Graph& graph)
      : graph_(graph), sizes_(graph), memory_(graph), backward_(backward_nodes(graph)) {}

  int run() {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      std::optional<Match> match = find(node);
      if (!match) continue;
      if (!may_rewrite()) break;
      rewrite(*match);
      ++rewrites;
    }
    return rewrites;
  }

 private:
  // ---- the forward half

  std::optional<Match> find(Node& node) const {
    if (node.is_erased() || backward_.contains(&node) || node.inputs.empty()) return std::nullopt;
    const std::optional<bool> is_safe = softmax_kind(node);
    if (!is_safe) return std::nullopt;
    const Value &x = *node.inputs[0], &y = *node.outputs[0];
    if (!is_real(&x) || !is_real(&y) || !sizes_.are_known(x)) return std::nullopt;
    Match match{.softmax = &node, .is_safe = *is_safe, .shape = shape_of(x)};
    const size_t rank = match.shape.size();
    if (rank != 3 && rank != 4) return std::nullopt;
    // A head is the work of one thread: one alone is better off with a library's many.
    if (hinted_size(graph_, ir::numel(leading(match.shape))) == 1) return std::nullopt;
    const auto scores = find_scores(node.inputs[0], match.shape, false, false);
    const auto weights = find_weights(node.outputs[0], match.shape);
    if (!scores || !weights || !find_operands(match, *scores, *weights)) return std::nullopt;
    match.scores = *scores;
    match.weights = *weights;
    if (!find_backward(match) || !are_alone(match) || !has_one_tag(match)) return std::nullopt;
    return match;
  }

  // A softmax over the last dim; whether it gives zeros where all scores are -inf.
  static std::optional<bool> softmax_kind(const Node& node) {
    const bool is_standard = ir::is(&node, "Softmax");
    const bool is_safe = ops::key_of(node) == ops::aten::kSafeSoftmax;
    if ((!is_standard && !is_safe) || !node.inputs[0] || !node.inputs[0]->type.shape) return {};
    const auto rank = static_cast<int64_t>(node.inputs[0]->type.shape->size());
    const int64_t axis = ir::int_attr(node.attrs, is_standard ? "axis" : "dim", -1);
    if (axis != -1 && axis != rank - 1) return {};
    return is_safe;
  }

  // Upwards, to the product. A mask comes after the scale.
  static std::optional<Scores> find_scores(Value* value, const Shape& shape, bool is_masked,
                                           bool is_scaled) {
    Node* node = value->producer;
    if (node == nullptr || !is_real(value)) return std::nullopt;
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
        if (!is_real(rest) || !(shape_of(*rest) == shape)) continue;
        found = find_scores(rest, shape, true, false);
        if (!found) continue;
        found->added = node->inputs[1 - side];
        break;
      }
    }
    if (found) found->nodes.push_back(node);
    return found;
  }

  // Downwards, to the product with values.
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
      if (!is_real(value)) return std::nullopt;
    }
    return found;
  }

  // Of one that draws.
  static std::optional<double> dropout_ratio(const Node& node) {
    if (node.inputs.size() != 3 || ir::has_attr(node.attrs, "seed")) return std::nullopt;
    const std::optional<double> ratio = ops::known_double(node.inputs[1]);
    const std::optional<double> training = ops::known_double(node.inputs[2]);
    if (!ratio || *ratio <= 0 || *ratio >= 1 || training != 1.0) return std::nullopt;
    return ratio;
  }

  // The reader in one of the halves; nullptr if there is none, or another one.
  Node* only_reader(const Value& value, bool in_backward) const {
    Node* found = nullptr;
    for (const ir::Use& use : value.uses) {
      const bool is_plain = use.node != nullptr && use.index >= 0;
      if (is_plain && backward_.contains(use.node) != in_backward) continue;
      if (!is_plain || found != nullptr) return nullptr;
      found = use.node;
    }
    return found;
  }

  // Whether the kernel takes all factors and masks.
  bool find_operands(Match& match, const Scores& scores, const Weights& weights) const {
    match.query = {scores.product->inputs[0], nullptr, false};
    match.key = {scores.product->inputs[1], nullptr, true};
    match.value = {weights.product->inputs[1], nullptr, false};
    Value* first = match.query.value;
    for (const Value* value : {first, match.key.value, match.value.value}) {
      if (!is_real(value) || !sizes_.are_known(*value)) return false;
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

  // Numbers in between that are wider than those which the kernel computes with stay so.
  static bool is_wide_enough(const Match& match, const Value& query) {
    return query.type.dtype == DType::kDouble ||
           (match.softmax->inputs[0]->type.dtype != DType::kDouble &&
            match.softmax->outputs[0]->type.dtype != DType::kDouble);
  }

  bool fits_mask(const Match& match, const Scores& scores) const {
    if (!scores.is_masked()) return true;
    const Value* mask = scores.filled ? scores.filled->condition : scores.added;
    if (!mask->type.is_known() || !sizes_.are_known(*mask)) return false;
    const Shape& shape = shape_of(*mask);
    if (shape.size() > match.shape.size()) return false;
    for (size_t i = 1; i <= shape.size(); ++i) {
      if (!(last(shape, i) == Dim(1)) && !(last(shape, i) == last(match.shape, i))) return false;
    }
    if (!region::takes_attention(mask)) return false;
    if (scores.filled) return mask->type.dtype == DType::kBool;
    const bool is_double = match.query.value->type.dtype == DType::kDouble;
    return is_real(mask) && (mask->type.dtype == DType::kDouble) == is_double;
  }

  // ---- the backward half

  // False if it reads what the kernel does not give.
  bool find_backward(Match& match) const {
    Backward found;
    Node *softmax = nullptr, *product = nullptr;
    for (Value* value : match.weights.values) {
      for (const ir::Use& use : value->uses) {
        if (use.node == nullptr || !backward_.contains(use.node)) continue;
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

  // From the backward softmax up to the product of the gradient of the result and values.
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
      if (!backward_.contains(&node)) return false;
      found.nodes.push_back(&node);
      if (ir::is(&node, "MatMul")) {
        Node* transpose = node.inputs[1]->producer;
        if (!swaps_last_dims(transpose) || transpose->inputs[0] != match.value.value) return false;
        found.nodes.push_back(transpose);
        found.gradient = node.inputs[0];
        return has_dropout && is_real(found.gradient) &&
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

  // From the backward softmax down to the products with queries and keys.
  bool find_below(const Match& match, Node& softmax, Backward& found) const {
    double scale = 1;
    bool is_filled = !match.scores.filled.has_value();
    Value* value = softmax.outputs[0];
    while (!ends_in_products(match, *value, found)) {
      Node* node = only_reader(*value, true);
      if (node == nullptr || !is_real(node->outputs[0])) return false;
      found.nodes.push_back(node);
      if (const auto scaled = multiple(*node); scaled && scaled->of == value) {
        scale *= scaled->factor;
      } else if (const auto zeros = filled(*node); zeros && !is_filled && zeros->of == value) {
        const Filled& wanted = *match.scores.filled;
        if (zeros->number != 0 || zeros->condition != wanted.condition ||
            zeros->where_true != wanted.where_true) {
          return false;
        }
        is_filled = true;
      } else if (!keeps_elements(*node)) {
        return false;
      }
      value = node->outputs[0];
    }
    return is_filled && are_close(scale, match.scores.scale);
  }

  // Whether all readers of `value` are the products that give the gradients of queries and keys.
  bool ends_in_products(const Match& match, const Value& value, Backward& found) const {
    Value *query = nullptr, *key = nullptr;
    Nodes nodes;
    for (const ir::Use& use : value.uses) {
      if (!ir::is(use.node, "MatMul") || use.index < 0) return false;
      Node* transpose = use.node->inputs[1 - use.index]->producer;
      if (!swaps_last_dims(transpose)) return false;
      const Value* factor = transpose->inputs[0];
      if (use.index == 0 && factor == match.key.value && query == nullptr) {
        query = use.node->outputs[0];
      } else if (use.index == 1 && factor == match.query.value && key == nullptr) {
        key = use.node->outputs[0];
      } else {
        return false;
      }
      nodes.insert(nodes.end(), {transpose, use.node});
    }
    if (query == nullptr && key == nullptr) return false;
    found.query = query;
    found.key = key;
    found.nodes.insert(found.nodes.end(), nodes.begin(), nodes.end());
    return true;
  }

  // ---- whether nothing else reads what goes

  static Nodes nodes_of(const Match& match) {
    Nodes nodes = match.scores.nodes;
    nodes.push_back(match.softmax);
    nodes.insert(nodes.end(), match.weights.nodes.begin(), match.weights.nodes.end());
    if (match.backward) {
      nodes.insert(nodes.end(), match.backward->nodes.begin(), match.backward->nodes.end());
    }
    return nodes;
  }

  static bool are_alone(const Match& match) {
    const Nodes nodes = nodes_of(match);
    const std::unordered_set<const Node*> inside(nodes.begin(), nodes.end());
    std::unordered_set<const Value*> results = {match.weights.product->outputs[0]};
    if (match.backward) {
      results.insert({match.backward->query, match.backward->key, match.backward->value});
    }
    for (const Node* node : nodes) {
      // The transposed factors stay as long as anything reads them.
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

  // Recomputation takes all of it, or nothing.
  static bool has_one_tag(const Match& match) {
    const Node& first = *match.softmax;
    const auto is_same = [&](const Node* node) {
      return node->recompute == first.recompute && node->region == first.region;
    };
    return std::all_of(match.scores.nodes.begin(), match.scores.nodes.end(), is_same) &&
           std::all_of(match.weights.nodes.begin(), match.weights.nodes.end(), is_same);
  }

  // ---- what the factors are made from

  // Steps back over views, copies and multiples of an operand, with its gradient: those of heads
  // that the kernel can read as they are. `scale` takes the multiples.
  void step_back(Operand& operand, const Shape& heads, double* scale, Nodes& gone) const {
    while (operand.value->producer != nullptr) {
      const Node& node = *operand.value->producer;
      const Shape& shape = shape_of(*operand.value);
      const Shape wanted =
          operand.is_transposed ? with_matrix(heads, last(heads, 1), last(heads, 2)) : heads;
      std::optional<Multiple> scaled = multiple(node);
      if (ir::is(&node, "Transpose")) {
        if (!operand.is_transposed || !swaps_last_dims(&node) || !(shape == wanted)) return;
        if (!follow_gradient(operand, gone,
                             [](const Node& next) { return swaps_last_dims(&next); })) {
          return;
        }
        operand.is_transposed = false;
        operand.value = node.inputs[0];
      } else if (scaled && scale != nullptr) {
        if (!may_read_instead(*scaled->of, *operand.value)) return;
        const auto is_same = [&](const Node& next) {
          const auto other = multiple(next);
          return other && are_close(other->factor, scaled->factor);
        };
        if (!follow_gradient(operand, gone, is_same)) return;
        *scale *= scaled->factor;
        operand.value = scaled->of;
      } else if (ir::is(&node, "Reshape")) {
        const Value& from = *node.inputs[0];
        if (shape == wanted || !is_real(&from) || !(shape_of(from) == wanted)) return;
        const auto is_back = [&](const Node& next) {
          return ir::is(&next, "Reshape") && next.outputs[0]->type.shape == from.type.shape;
        };
        if (!follow_gradient(operand, gone, is_back)) return;
        operand.value = node.inputs[0];
      } else if (ir::is(&node, "Identity") || ir::is(&node, "Expand")) {
        if (!keeps_elements(node)) return;
        if (ir::is(&node, "Identity") && !may_read_instead(*node.inputs[0], *operand.value)) return;
        operand.value = node.inputs[0];
      } else {
        return;
      }
    }
  }

  // To the gradient of what a step was made from, if there is one: by the only reader.
  template <typename Predicate>
  bool follow_gradient(Operand& operand, Nodes& gone, Predicate is_step) const {
    if (operand.gradient == nullptr) return true;
    if (operand.gradient->uses.size() != 1) return false;
    const ir::Use& use = operand.gradient->uses.front();
    if (use.node == nullptr || use.index < 0 || !backward_.contains(use.node)) return false;
    if (!is_step(*use.node) || !is_real(use.node->outputs[0])) return false;
    const Value& next = *use.node->outputs[0];
    if (next.type.strides && !takes_any_layout(next)) return false;
    gone.push_back(use.node);
    operand.gradient = use.node->outputs[0];
    return true;
  }

  // Both halves may read `source` in place of what was computed from it: nobody writes there.
  bool may_read_instead(const Value& source, const Value& made) const {
    if (memory_.is_written(&source) || memory_.is_written(&made)) return false;
    return !memory_.leaves(&source) && !(memory_.is_callers(&source) && memory_.has_yield());
  }

  // ---- the rewrite

  void rewrite(Match& match) {
    const Shape& shape = match.shape;
    const Dim &queries = last(shape, 2), &keys = last(shape, 1);
    const Dim features = last(shape_of(*match.query.value), 1);
    const Shape of_queries = with_matrix(shape, queries, features);
    const Shape of_keys = with_matrix(shape, keys, features);
    Nodes gone = nodes_of(match);
    double scale = match.scores.scale;
    step_back(match.query, of_queries, &scale, gone);
    step_back(match.key, of_keys, &scale, gone);
    step_back(match.value, of_keys, nullptr, gone);

    Node& before = *match.weights.product;
    std::vector<Value*> inputs = {heads(match.query, of_queries, before),
                                  heads(match.key, of_keys, before),
                                  heads(match.value, of_keys, before)};
    ir::Attrs attrs = {{"scale", scale}};
    if (!match.is_safe) attrs["unseen_is_nan"] = Dim(1);
    std::vector<Value*> rules = rules_of(match, attrs, before);
    std::vector<Value*> forward = inputs;
    forward.insert(forward.end(), rules.begin(), rules.end());
    const Value& query = *inputs[0];
    Shape sums = shape_of(query);
    sums.pop_back();
    Type logarithm = ops::with_shape(query.type, sums);
    if (logarithm.dtype != DType::kDouble) logarithm.dtype = DType::kFloat;
    Node& attention =
        write(before).add({ir::kTorchOrtDomain, "Attention"}, forward,
                          {ops::with_shape(query.type, shape_of(query)), logarithm}, attrs);
    Value* result = match.weights.product->outputs[0];
    const bool leaves = memory_.leaves(result) || memory_.is_written(result);
    hand_over(result, attention.outputs[0], of_queries, before);
    if (match.backward) write_backward(match, inputs, attention, rules, attrs);
    erase_all(gone);
    if (leaves) memory_ = SharedMemory(graph_);
  }

  // [batch, heads, length, features], whichever of them the program has.
  Value* heads(const Operand& operand, const Shape& shape, Node& before) {
    Value* value = operand.value;
    const Shape wanted =
        operand.is_transposed ? with_matrix(shape, last(shape, 1), last(shape, 2)) : shape;
    if (!(shape_of(*value) == wanted)) value = write(before).reshape(value, wanted);
    if (operand.is_transposed) value = swap(*value, before);
    return shape.size() == 4 ? value : unsqueeze(value, before);
  }

  std::vector<Value*> rules_of(Match& match, ir::Attrs& attrs, Node& before) {
    std::vector<Value*> rules;
    const Scores& scores = match.scores;
    if (scores.filled) {
      Value* condition = scores.filled->condition;
      if (!scores.filled->where_true) condition = write(before).make("Not", {condition});
      rules.push_back(condition);
      attrs["fill"] = scores.filled->number;
    } else if (scores.added != nullptr) {
      if (is_causal_mask(*scores.added, match.shape)) {
        attrs["is_causal"] = Dim(1);
      } else {
        rules.push_back(scores.added);
      }
    }
    if (Node* dropout = match.weights.dropout) {
      // The draws go through memory in order, so the mask has the strides of the result.
      Type type = dropout->outputs[0]->type;
      type.dtype = DType::kBool;
      attrs["keep"] = match.weights.keep;
      rules.push_back(
          write(*dropout).make_ours("BernoulliMask", {}, type, {{"keep", match.weights.keep}}));
    }
    return rules;
  }

  void write_backward(const Match& match, const std::vector<Value*>& inputs, Node& attention,
                      const std::vector<Value*>& rules, const ir::Attrs& attrs) {
    const Nodes& old = match.backward->nodes;
    Node* before = nullptr;
    for (Node& node : graph_.nodes) {
      if (std::find(old.begin(), old.end(), &node) != old.end()) {
        before = &node;
        break;
      }
    }
    const Shape of_queries =
        with_matrix(match.shape, last(match.shape, 2), last(shape_of(*inputs[0]), 1));
    const Shape of_keys = with_matrix(match.shape, last(match.shape, 1), last(of_queries, 1));
    Operand gradient{match.backward->gradient, nullptr, false};
    Nodes none;
    step_back(gradient, of_queries, nullptr, none);
    std::vector<Value*> reads = {heads(gradient, of_queries, *before)};
    reads.insert(reads.end(), inputs.begin(), inputs.end());
    reads.push_back(attention.outputs[1]);
    reads.insert(reads.end(), rules.begin(), rules.end());
    std::vector<Type> types;
    for (const Value* input : inputs) {
      types.push_back(ops::with_shape(input->type, shape_of(*input)));
    }
    Node& made = write(*before).add({ir::kTorchOrtDomain, "AttentionGrad"}, reads, types, attrs);
    hand_over(match.query, made.outputs[0], of_queries, *before);
    hand_over(match.key, made.outputs[1], of_keys, *before);
    hand_over(match.value, made.outputs[2], of_keys, *before);
  }

  void hand_over(const Operand& operand, Value* made, const Shape& shape, Node& before) {
    if (operand.gradient == nullptr) return;
    if (operand.is_transposed) {
      if (shape.size() == 3) made = squeeze(made, before);
      // Views of the product count on its strides.
      made = write(before).make("Identity", {swap(*made, before)});
      replace(*operand.gradient, *made, before);
    } else {
      hand_over(operand.gradient, made, shape, before);
    }
  }

  // `made`, heads of the given shape, takes the place of `old`, which may have its batch and heads
  // in one dim.
  void hand_over(Value* old, Value* made, const Shape& shape, Node& before) {
    if (shape.size() == 3) made = squeeze(made, before);
    bypass_reshapes(*old, *made);
    if (!old->uses.empty()) replace(*old, *made, before);
    bypass_reshapes(*made, *made);
    if (shape.size() == 4) lay_out(*made);
  }

  // Readers of reshapes to the shape of `made` read it instead.
  void bypass_reshapes(Value& value, Value& made) {
    const std::vector<ir::Use> uses = value.uses;
    for (const ir::Use& use : uses) {
      if (!ir::is(use.node, "Reshape") || use.index != 0) continue;
      Value& result = *use.node->outputs[0];
      if (!(result.type == made.type)) continue;
      bypass_reshapes(result, made);
      ir::replace_uses(result, made, graph_);
      ir::erase(graph_, *use.node);
    }
  }

  void replace(Value& old, Value& made, Node& before) {
    Value* like = &made;
    if (!(shape_of(old) == shape_of(made))) like = write(before).reshape(&made, shape_of(old));
    like = write(before).cast(like, old.type.dtype);
    const bool moves = old.type.strides != like->type.strides;
    ir::replace_uses(old, *like, graph_);
    if (moves) lay_out_readers(*like);
  }

  // A result whose readers want it transposed and row-major lies so from the start: their copy
  // goes.
  void lay_out(Value& made) {
    if (made.uses.size() != 1 || !ir::is(made.uses[0].node, "Transpose")) return;
    Node& old = *made.uses[0].node;
    Value& seen = *old.outputs[0];
    if (memory_.leaves(&seen) || memory_.is_written(&seen) || !takes_any_layout(seen)) return;
    const Shape order = ir::ints_attr(old.attrs, "perm", {});
    const Shape wanted = ir::contiguous_strides(shape_of(seen));
    Shape strides(order.size());
    for (size_t i = 0; i < order.size(); ++i) strides[order[i].constant()] = wanted[i];
    made.type = ops::view_type(made.type, shape_of(made), strides);
    seen.type.strides.reset();
    const std::vector<ir::Use> uses = seen.uses;
    for (const ir::Use& use : uses) {
      if (!ir::is(use.node, "Identity")) continue;
      Value& copy = *use.node->outputs[0];
      if (!(copy.type == seen.type) || memory_.leaves(&copy) || memory_.is_written(&copy)) continue;
      ir::replace_uses(copy, seen, graph_);
      ir::erase(graph_, *use.node);
    }
    lay_out_readers(seen);
  }

  // Whether the elements of a value, of its views and of what is joined from them may lie row-major
  // instead: operators of PyTorch and of users may count on an order, or give results in it.
  static bool takes_any_layout(const Value& value) {
    return std::all_of(value.uses.begin(), value.uses.end(), [](const ir::Use& use) {
      if (use.node == nullptr || use.index < 0) return false;
      const Node& node = *use.node;
      const bool is_known = node.op.domain.empty() || node.op.domain == ir::kTorchOrtDomain;
      return is_known &&
             std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* output) {
               if (output == nullptr || has_own_layout(node, *output)) return true;
               return follows(node) && takes_any_layout(*output);
             });
    });
  }

  // Results whose elements lie in the order of those of an operand.
  static bool follows(const Node& node) { return ops::is_view(node) || ir::is(&node, "Concat"); }

  // A result that is written in the order which its type says.
  static bool has_own_layout(const Node& node, const Value& output) {
    if (ops::is_view(node)) return false;
    return !output.type.strides || ops::fused_form(node).kind == ops::FusedForm::Kind::kPointwise;
  }

  // For a value that takes any layout, and has got another one.
  static void lay_out_readers(Value& value) {
    for (const ir::Use& use : value.uses) {
      for (Value* output : use.node->outputs) {
        if (output == nullptr || has_own_layout(*use.node, *output)) continue;
        output->type.strides.reset();
        ops::infer_types(*use.node);
        lay_out_readers(*output);
      }
    }
  }

  ops::Writer write(Node& before) { return ops::Writer(graph_, &before); }

  Value* squeeze(Value* value, Node& before) {
    return write(before).make("Squeeze", {value, write(before).ints({0})});
  }

  Value* unsqueeze(Value* value, Node& before) {
    return write(before).make("Unsqueeze", {value, write(before).ints({0})});
  }

  Value* swap(Value& value, Node& before) {
    return write(before).transpose(&value, swapped_order(shape_of(value).size()));
  }

  // Those that nothing reads any more; a node goes after its readers.
  void erase_all(Nodes nodes) {
    const auto is_unread = [](const Node* node) {
      return std::all_of(node->outputs.begin(), node->outputs.end(), [](const Value* value) {
        return value == nullptr || value->uses.empty();
      });
    };
    for (bool found = true; found;) {
      found = false;
      for (Node* node : nodes) {
        if (node->is_erased() || !is_unread(node)) continue;
        ir::erase(graph_, *node);
        found = true;
      }
    }
  }

  Graph& graph_;
  const KnownSizes sizes_;
  SharedMemory memory_;
  const std::unordered_set<const Node*> backward_;
};

}  // namespace

int fuse_attention(Graph& graph) { return AttentionFusion(graph).run(); }

}  // namespace torch_ort::passes
