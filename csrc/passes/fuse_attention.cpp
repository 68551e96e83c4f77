// Attention that a program spells out (attention_match.h) -> torch_ort.Attention, and its backward
// nodes -> torch_ort.AttentionGrad.
//
// PyTorch's own attention is decomposed into such nodes if its fused kernel does not support
// dropout, and models write them by hand. The pass looks at the graph rather than at calls, so it
// finds both, whichever tracer captured them. The engine's kernel (cpu/attention.cpp) holds a block
// of scores at a time, so no matrix of scores is saved for backward.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/attention_match.h"
#include "passes/attention_operands.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "passes/layouts.h"
#include "passes/memory.h"
#include "passes/unread.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using attention::last;
using attention::Match;
using attention::Nodes;
using attention::Operand;
using attention::Scores;
using attention::shape_of;
using attention::with_matrix;
using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

class AttentionFusion {
 public:
  explicit AttentionFusion(Graph& graph)
      : graph_(graph),
        memory_(graph),
        backward_(backward_nodes(graph)),
        steps_(memory_, backward_) {}

  int run(PassContext& context) {
    const KnownSizes sizes(graph_);
    const attention::Scope scope{graph_, sizes, backward_};
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      std::optional<Match> match = attention::find_attention(scope, node);
      if (!match) continue;
      if (!context.may_rewrite()) break;
      rewrite(*match);
      ++rewrites;
    }
    return rewrites;
  }

 private:
  void rewrite(Match& match) {
    const Shape& shape = match.shape;
    const Dim &queries = last(shape, 2), &keys = last(shape, 1);
    const Dim features = last(shape_of(*match.query.value), 1);
    const Shape of_queries = with_matrix(shape, queries, features);
    const Shape of_keys = with_matrix(shape, keys, features);
    Nodes gone = attention::nodes_of(match);
    double scale = match.scores.scale;
    steps_.step_back(match.query, of_queries, &scale, gone);
    steps_.step_back(match.key, of_keys, &scale, gone);
    steps_.step_back(match.value, of_keys, nullptr, gone);

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
    Node& made =
        write(before).add({ir::kTorchOrtDomain, "Attention"}, forward,
                          {ops::with_shape(query.type, shape_of(query)), logarithm}, attrs);
    Value* result = match.weights.product->outputs[0];
    const bool leaves = memory_.leaves(result) || memory_.is_written(result);
    hand_over(result, made.outputs[0], of_queries, before);
    if (match.backward) write_backward(match, inputs, *made.outputs[1], rules, attrs);
    erase_unread(graph_, gone);
    if (leaves) memory_ = SharedMemory(graph_);
  }

  // The operand as [batch, heads, length, features], whatever rank it has in the program.
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
      if (attention::is_causal_mask(*scores.added, match.shape)) {
        attrs["is_causal"] = Dim(1);
      } else {
        rules.push_back(scores.added);
      }
    }
    if (Node* dropout = match.weights.dropout) {
      // The kernel draws in the order of memory, so the mask must have the strides of the result.
      Type type = dropout->outputs[0]->type;
      type.dtype = DType::kBool;
      attrs["keep"] = match.weights.keep;
      rules.push_back(
          write(*dropout).make_ours("BernoulliMask", {}, type, {{"keep", match.weights.keep}}));
    }
    return rules;
  }

  void write_backward(const Match& match, const std::vector<Value*>& inputs, Value& logarithm,
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
    steps_.step_back(gradient, of_queries, nullptr, none);
    std::vector<Value*> reads = {heads(gradient, of_queries, *before)};
    reads.insert(reads.end(), inputs.begin(), inputs.end());
    reads.push_back(&logarithm);
    reads.insert(reads.end(), rules.begin(), rules.end());
    std::vector<Type> types;
    for (const Value* input : inputs) {
      types.push_back(ops::with_shape(input->type, shape_of(*input)));
    }
    Value* scores = match.backward->scores;
    if (scores != nullptr) {
      Shape shape = match.shape;
      if (shape.size() == 3) shape.insert(shape.begin(), Dim(1));
      types.push_back(ops::with_shape(scores->type, shape));
    }
    Node& made = write(*before).add({ir::kTorchOrtDomain, "AttentionGrad"}, reads, types, attrs);
    hand_over(match.query, made.outputs[0], of_queries, *before);
    hand_over(match.key, made.outputs[1], of_keys, *before);
    hand_over(match.value, made.outputs[2], of_keys, *before);
    if (scores != nullptr) hand_over(scores, made.outputs[3], match.shape, *before);
  }

  void hand_over(const Operand& operand, Value* made, const Shape& shape, Node& before) {
    if (operand.gradient == nullptr) return;
    if (operand.is_transposed) {
      if (shape.size() == 3) made = squeeze(made, before);
      // The gradient of a product is returned with the strides of the old node: views of it depend
      // on them.
      made = write(before).make("Identity", {swap(*made, before)});
      replace(*operand.gradient, *made, before);
    } else {
      hand_over(operand.gradient, made, shape, before);
    }
  }

  // Makes the readers of `old` read `made`, which has the given shape of heads. `old` may have
  // batch and heads in one dim.
  void hand_over(Value* old, Value* made, const Shape& shape, Node& before) {
    if (shape.size() == 3) made = squeeze(made, before);
    bypass_reshapes(*old, *made);
    if (!old->uses.empty()) replace(*old, *made, before);
    bypass_reshapes(*made, *made);
    if (shape.size() == 4) lay_out(*made);
  }

  // If a reader reshapes `value` to the shape of `made`, the readers of this reshape read `made`
  // directly.
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
    if (moves) follow_layout(*like);
  }

  // If the only reader transposes the result and copies it to row-major memory, the result is
  // written in that order from the start, and the copy is removed.
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
    follow_layout(seen);
  }

  ops::Writer write(Node& before) { return ops::Writer(graph_, &before); }

  Value* squeeze(Value* value, Node& before) {
    return write(before).make("Squeeze", {value, write(before).ints({0})});
  }

  Value* unsqueeze(Value* value, Node& before) {
    return write(before).make("Unsqueeze", {value, write(before).ints({0})});
  }

  Value* swap(Value& value, Node& before) {
    return write(before).transpose(&value, attention::swapped_order(shape_of(value).size()));
  }

  Graph& graph_;
  SharedMemory memory_;
  const std::unordered_set<const Node*> backward_;
  const attention::OperandSteps steps_;
};

}  // namespace

int fuse_attention(Graph& graph, PassContext& context) {
  return AttentionFusion(graph).run(context);
}

}  // namespace torch_ort::passes
