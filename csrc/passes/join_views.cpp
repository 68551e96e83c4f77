// A view of a view -> one view of the base of the first, or the base itself if the second view
// undoes the first:
//
//   Transpose(Transpose(x)) -> x         a weight in backward, and the gradient of one
//   Reshape(Reshape(x)) -> Reshape(x)    rows of a product that become rows of a loss
//
// This reads and writes no elements, since transposes are views, and so are reshapes of row-major
// tensors. Declines if the memory is written, and if the two views are in different halves, since
// the base would be saved for backward.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

enum class Kind { kOther, kReshape, kTranspose };

bool is_row_major(const Value& value) { return value.type.is_known() && !value.type.strides; }

Kind kind_of(const Node* node) {
  if (node == nullptr || node->outputs.size() != 1 || node->outputs[0] == nullptr ||
      !ops::is_view(*node)) {
    return Kind::kOther;
  }
  const Value &x = *node->inputs[0], &y = *node->outputs[0];
  if (ir::is(node, "Transpose")) {
    return ir::has_attr(node->attrs, "perm") && x.type.is_known() ? Kind::kTranspose : Kind::kOther;
  }
  if (!ops::work_of(*node).keeps_elements || !is_row_major(x) || !is_row_major(y)) {
    return Kind::kOther;
  }
  // A 0 among the sizes of a Reshape means the size of its input, which would be another one after
  // the rewrite.
  const Shape& shape = *y.type.shape;
  const bool has_zero = std::find(shape.begin(), shape.end(), Dim(0)) != shape.end();
  return has_zero ? Kind::kOther : Kind::kReshape;
}

// For each axis of the result, the axis of the input of the first of the two transposes.
Shape joined_order(const Node& first, const Node& second) {
  const auto order_of = [](const Node& node) {
    const auto rank = static_cast<int64_t>(node.outputs[0]->type.shape->size());
    return ops::wrap_axes(node, ir::ints_attr(node.attrs, "perm", {}), rank);
  };
  const std::vector<int64_t> before = order_of(first);
  Shape order;
  for (int64_t axis : order_of(second)) order.push_back(before[axis]);
  return order;
}

bool is_unchanged(const Shape& order) {
  for (size_t i = 0; i < order.size(); ++i) {
    if (!(order[i] == Dim(static_cast<int64_t>(i)))) return false;
  }
  return true;
}

bool leaves(const Value& value) {
  return std::any_of(value.uses.begin(), value.uses.end(),
                     [](const ir::Use& use) { return use.node == nullptr || is_border(use.node); });
}

class Joiner {
 public:
  explicit Joiner(Graph& graph) : graph_(graph), memory_(graph), backward_(backward_nodes(graph)) {}

  int run(PassContext& context) {
    int rewrites = 0;
    // Nodes come after their inputs, so the views that a node reads have been joined already.
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      const Kind kind = kind_of(&node);
      if (kind == Kind::kOther || kind_of(node.inputs[0]->producer) != kind) continue;
      const Node& first = *node.inputs[0]->producer;
      if (!may_join(first, node)) continue;
      Value &x = *first.inputs[0], &y = *node.outputs[0];
      const Shape order = kind == Kind::kTranspose ? joined_order(first, node) : Shape();
      const bool is_undone =
          kind == Kind::kTranspose ? is_unchanged(order) : x.type.shape == y.type.shape;
      if (is_undone && !can_stand_for(x, y)) continue;
      if (!context.may_rewrite()) return rewrites;

      ir::replace_uses(y, is_undone ? x : view(node, x, order), graph_);
      ir::erase(graph_, node);
      ++rewrites;
    }
    return rewrites;
  }

 private:
  bool may_join(const Node& first, const Node& second) const {
    return are_together(backward_, first, second) && !memory_.is_written(second.outputs[0]);
  }

  // An output of the graph must be a tensor object of its own, even if it shares memory with
  // others.
  bool can_stand_for(const Value& x, const Value& y) const {
    return x.type == y.type && (!leaves(y) || (!leaves(x) && !memory_.is_callers(&x)));
  }

  // The result of `node` as one view of `x`. `order` is that of a Transpose; empty means a Reshape.
  Value& view(Node& node, Value& x, const Shape& order) {
    ops::Writer write(graph_, &node);
    const ir::Type type = node.outputs[0]->type;
    Node& made =
        order.empty()
            ? write.add_named(node.name, {"", "Reshape"}, {&x, write.ints(*type.shape)}, {type})
            : write.add_named(node.name, node.op, {&x}, {type}, {{"perm", order}});
    if (backward_.contains(&node)) backward_.insert(&made);
    return *made.outputs[0];
  }

  Graph& graph_;
  const SharedMemory memory_;
  std::unordered_set<const Node*> backward_;
};

}  // namespace

int join_views(Graph& graph, PassContext& context) { return Joiner(graph).run(context); }

}  // namespace torch_ort::passes
