// The cross-entropy of a linear layer -> torch_ort.LinearCrossEntropy (ops/linear_loss.h), which
// computes the logits for a chunk of rows at a time:
//
//   NllLoss(LogSoftmax(views and casts of MatMul(hidden, weight^T) + bias), labels)
//
// In backward, the gradient of the loss is one number. So the kernel computes the gradients of the
// hidden rows, the weight and the bias in the forward half, where it has the logits, and backward
// multiplies them by that number. No tensor of rows x classes is saved for backward. If another
// node of the forward half reads the logits, the kernel writes them once. If these logits have a
// gradient of their own, it passes through the old nodes, and both gradients are added; that part
// is cut off if no such gradient comes.
//
// Two results for each row may be read and have gradients besides: the sum of all log-probabilities
// (label smoothing), and logsumexp, which is squared in the end (a z-loss). The losses themselves
// may be those of rows. Then each row has its own gradients. The forward half knows these up to one
// number if they are all multiples of the same one (passes/multiples.h), which is the case for
// means and sums of rows with any weights. The logits may have a soft cap, cap * tanh(product /
// cap). Rows that a slice leaves out of the loss are treated as rows with an ignored label.
//
// Declines if gradients of rows are not such multiples, if backward reads the logits, and if little
// memory would be saved.
//
// The gradients are saved for backward in float32, since a loss scale could not restore what
// float16 has lost. The gradient of the weight takes memory from the forward half on, so little
// would be saved where the logits take not much more than it.
//
// Losses of rows that are returned, or that enter more than products (a focal loss), are among what
// is declined: their gradients are known only in backward, and recomputing the logits there took
// longer than the usual nodes (benchmarks/results/decisions.md).

#include "ir/edit.h"
#include "ops/formula.h"
#include "ops/linear_loss.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/attention_words.h"
#include "passes/context.h"
#include "passes/loss_match.h"
#include "passes/loss_words.h"
#include "passes/unread.h"

#include <optional>

namespace torch_ort::passes {

namespace {

using attention::shape_of;
using attention::swaps_last_dims;
using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using losses::Backward;
using losses::Cut;
using losses::factors_of;
using losses::Match;
using losses::read_first;

class Rewriter {
 public:
  Rewriter(Graph& graph, Match& match)
      : graph_(graph),
        match_(match),
        form_(match.form),
        classes_(shape_of(*match.weight)[1]),
        width_(shape_of(*match.weight)[0]),
        sums_(ops::computed_dtype(match.hidden->type.dtype)) {}

  void run() {
    Node& made = write_loss();
    size_t next = 2;
    Value* logits = form_.has_logits ? made.outputs[next++] : nullptr;
    hand_over_rows(*made.outputs[0], *match_.loss, form_.reduction == ops::Reduction::kNone);
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
      hand_over_rows(*made.outputs[next++], *node, node == match_.sums);
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
    const Dim rows = losses::rows_of_product(match_);
    Value* hidden = match_.hidden;
    if (shape_of(*hidden).size() != 2) hidden = write.reshape(hidden, {rows, width_});
    Value* weight = swaps_last_dims(match_.weight->producer)
                        ? match_.weight->producer->inputs[0]
                        : write.transpose(match_.weight, {1, 0});
    const Shape of_loss = form_.reduction == ops::Reduction::kNone ? Shape{rows} : Shape{};
    std::vector<Value*> inputs = {hidden, weight, write_labels(write, rows)};
    if (form_.has_bias) inputs.push_back(match_.bias);
    if (form_.has_class_weight) inputs.push_back(match_.class_weight);
    if (match_.backward) {
      const Backward& backward = *match_.backward;
      if (form_.has_loss_grad) {
        inputs.push_back(write_multiple(write, backward.of_loss, of_loss, !of_loss.empty()));
      }
      if (form_.has_sums_grad) {
        inputs.push_back(write_multiple(write, backward.of_sums, {rows}, true));
      }
      if (form_.has_square_grad) {
        inputs.push_back(write_multiple(write, backward.of_logsumexp, {rows}, false));
      }
    }
    std::vector<Type> types = {sums_of(of_loss), sums_of({workspace_size()})};
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

  int64_t workspace_size() const {
    const int64_t classes = classes_.constant();
    return match_.uses_library
               ? ops::library_workspace(form_, classes, match_.hidden->type.dtype).size
               : ops::workspace_size(form_, classes, width_.constant());
  }

  // Computes a gradient for the case that the number of which it is a multiple is 1.
  Value* write_multiple(ops::Writer& write, const Value* gradient, const Shape& shape,
                        bool is_cut) const {
    const Value* number = match_.backward->gradient;
    Value* made = match_.multiples->write(write, gradient, factors_of(match_, number), sums_);
    if (is_cut) made = write_all_rows(write, made, ops::Arg{0.0}, sums_);
    return shape_of(*made) == shape ? made : write.reshape(made, shape);
  }

  // Adds to `gone` the nodes that compute the gradients of rows in backward. Nothing reads them
  // after the rewrite.
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

  // Labels for all rows of the logits. Rows that are not part of the loss get the ignored label.
  Value* write_labels(ops::Writer& write, const Dim& rows) const {
    Value* labels =
        write_all_rows(write, match_.labels, ops::Arg{Dim(form_.ignore_index)}, DType::kInt64);
    return shape_of(*labels).size() == 1 ? labels : write.reshape(labels, {rows});
  }

  // Pads numbers of the rows that the loss is made of to all rows of the logits. The other rows get
  // `rest`.
  Value* write_all_rows(ops::Writer& write, Value* numbers, const ops::Arg& rest,
                        DType dtype) const {
    for (const Node* node : match_.chain) {
      const std::optional<Cut> cut = losses::cut_of(*node);
      if (!cut) continue;
      Shape shape = shape_of(*node->outputs[0]);
      shape.pop_back();
      if (!(shape_of(*numbers) == shape)) numbers = write.reshape(numbers, shape);
      Shape pads(2 * shape.size(), Dim(0));
      pads[cut->axis] = cut->before;
      pads[shape.size() + cut->axis] = cut->after;
      Value& others = ir::add_initializer(graph_, "rest", Type{.dtype = dtype, .shape = Shape{}},
                                          ops::scalar_data(rest, dtype));
      numbers = write.make("Pad", {numbers, write.ints(pads), &others});
    }
    return numbers;
  }

  // Slices numbers of all rows of the logits to the rows that the loss is made of.
  Value* write_rows_of_loss(ops::Writer& write, Value* numbers) const {
    for (auto node = match_.chain.rbegin(); node != match_.chain.rend(); ++node) {
      const std::optional<Cut> cut = losses::cut_of(**node);
      if (!cut) continue;
      Shape from = shape_of(*(*node)->inputs[0]);
      from.pop_back();
      if (!(shape_of(*numbers) == from)) numbers = write.reshape(numbers, from);
      const Dim before = cut->before, end = ops::minus(from[cut->axis], cut->after);
      numbers = write.make("Slice", {numbers, write.ints({before}), write.ints({end}),
                                     write.ints({static_cast<int64_t>(cut->axis)})});
    }
    return numbers;
  }

  Type sums_of(Shape shape) const {
    Type type = ops::with_shape(match_.hidden->type, std::move(shape));
    type.dtype = sums_;
    return type;
  }

  // Logits that are returned may have a gradient of their own, which the old nodes compute. Through
  // the cap these need tanh of the logits, so it is recomputed in backward.
  void write_tanh(Node& of_tanh) {
    ops::Writer write(graph_, &of_tanh);
    Value* made = write.again(*match_.product, match_.product->inputs).outputs[0];
    for (auto node = match_.chain.rbegin(); node != match_.chain.rend(); ++node) {
      std::vector<Value*> inputs = (*node)->inputs;
      inputs[losses::slot_of_logits(**node)] = made;
      made = write.again(**node, inputs).outputs[0];
      if (*node == match_.tanh) break;
    }
    ir::set_input(of_tanh, 1, made);
  }

  // Makes the readers of `node` read `numbers` instead: one number for each row, or one for all.
  void hand_over_rows(Value& numbers, Node& node, bool is_cut) {
    ops::Writer write(graph_, match_.first);
    Value& old = *node.outputs[0];
    Value* made = write.cast(&numbers, old.type.dtype);
    if (is_cut) made = write_rows_of_loss(write, made);
    if (!(shape_of(*made) == shape_of(old))) made = write.reshape(made, shape_of(old));
    ir::replace_uses(old, *made, graph_);
  }

  // Makes the readers of `node` read the gradient that the new node has computed. If the logits
  // also have a gradient from elsewhere, `node` stays and computes that one, and the two are added.
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

  // Other readers of the logits, or of views and casts of them on the way to the loss, now read the
  // same views and casts of the logits that the new node writes.
  void hand_over_logits(Value* logits, const std::vector<Node*>& gone) {
    if (logits == nullptr) return;
    ops::Writer write(graph_, match_.first);
    Value& old = *match_.product->outputs[0];
    if (!(shape_of(*logits) == shape_of(old))) logits = write.reshape(logits, shape_of(old));
    std::vector<Node*> made(match_.chain.rbegin(), match_.chain.rend());
    std::vector<Value*> values = {logits};
    std::vector<Node*> again;
    bool has_cap = match_.outer == nullptr;
    for (const Node* node : made) {
      const bool is_in_logits = !has_cap && (losses::is_cast(*node) || node == match_.inner ||
                                             node == match_.tanh || node == match_.outer);
      has_cap |= node == match_.outer;
      std::vector<Value*> inputs = node->inputs;
      inputs[0] = values.back();
      if (!is_in_logits) again.push_back(&write.again(*node, inputs));
      values.push_back(is_in_logits ? values.back() : again.back()->outputs[0]);
    }
    erase_left(gone);
    for (size_t i = made.size(); i-- > 0;) {
      if (made[i]->is_erased()) continue;
      ir::replace_uses(*made[i]->outputs[0], *values[i + 1], graph_);
      ir::erase(graph_, *made[i]);
    }
    ir::replace_uses(old, *values[0], graph_);
    ir::erase(graph_, *match_.product);
    erase_unread(graph_, again);
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

int chunk_losses(Graph& graph, PassContext& context) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !ir::is(&node, "LogSoftmax")) continue;
    std::optional<Match> match = losses::find_loss(graph, node);
    if (!match) continue;
    if (!context.may_rewrite()) break;
    Rewriter(graph, *match).run();
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
