// Sums whose last term can be added where the rest of the sum is:
//
//   Add(MatMul(a, b), MatMul(c, d))     -> Gemm(c, d, MatMul(a, b))
//   Add(x, EmbeddingGrad(gradient, ids)) -> EmbeddingGrad(gradient, ids, x)
//
// These are gradients of what is used several times: of a weight in each step of a recurrent layer,
// of the tensor that queries, keys and values are projected from, or of a table of embeddings that
// is also the weight of the last layer. The kernel reads the numbers that it starts from where it
// writes its result, so that one tensor serves the whole sum. The separate terms would all be alive
// until they are added, and would be read once more; those of an embedding are mostly zeros.
//
// Both products may be viewed before they are added. Declines unless the sum is the only reader of
// what goes into it, and all are in the same half and are recomputed together if at all. Only for
// devices whose products and gradients of embeddings are the engine's own and can start from a
// tensor: the products of libraries copy it first.

#include "ir/edit.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Type;
using ir::Value;

// An operand of an Add that is a product of two matrices, or a view of one.
struct Term {
  Node* product = nullptr;  // nullptr: the operand is something else
  std::vector<Node*> views;

  Value& matrix() const { return *product->outputs[0]; }
};

bool is_float_matrix(const Type& type) {
  return type.is_known() && type.shape->size() == 2 && ir::is_float(type.dtype);
}

bool has_plain_factors(const Node& product) {
  for (size_t i : {0, 1}) {
    const Type& type = product.inputs.at(i)->type;
    if (!is_float_matrix(type) || type.dtype != product.outputs[0]->type.dtype) return false;
  }
  return true;
}

class Accumulator {
 public:
  explicit Accumulator(Graph& graph)
      : graph_(graph), memory_(graph), backward_(backward_nodes(graph)) {
    for (const Node& node : graph.nodes) position_.emplace(&node, position_.size());
  }

  int run(PassContext& context) {
    int rewrites = 0;
    for (Node& node : graph_.nodes) {
      if (node.is_erased() || !ir::is(&node, "Add")) continue;
      if (const std::optional<size_t> side = find_embedding(node)) {
        if (!context.may_rewrite()) return rewrites;
        rewrite_embedding(node, *side);
        ++rewrites;
        continue;
      }
      Term first = find(node.inputs.at(0)), second = find(node.inputs.at(1));
      if (first.product == nullptr || second.product == nullptr) continue;
      if (position_.at(first.product) > position_.at(second.product)) std::swap(first, second);
      if (!fits(node, first, second)) continue;
      if (!context.may_rewrite()) return rewrites;
      rewrite(node, first, second);
      ++rewrites;
    }
    return rewrites;
  }

 private:
  Term find(Value* value) const {
    Term term;
    while (value->uses.size() == 1 && value->producer != nullptr && !memory_.is_written(value)) {
      Node* node = value->producer;
      if (ir::is(node, "MatMul") || ir::is(node, "Gemm")) {
        if (is_float_matrix(value->type) && has_plain_factors(*node)) term.product = node;
        return term;
      }
      if (!ir::is(node, "Reshape")) return term;
      term.views.push_back(node);
      value = node->inputs[0];
    }
    return term;
  }

  bool fits(const Node& add, const Term& first, const Term& second) const {
    const Type &sum = add.outputs[0]->type, &type = second.matrix().type;
    return ir::is(second.product, "MatMul") && first.matrix().type == type && !type.strides &&
           sum.is_known() && sum.dtype == type.dtype && !sum.strides &&
           sum.shape == add.inputs[0]->type.shape && sum.shape == add.inputs[1]->type.shape &&
           region::has_kernel(&second.matrix(), "Rows") && are_together(*first.product, add) &&
           are_together(*second.product, add);
  }

  bool are_together(const Node& a, const Node& b) const {
    return backward_.contains(&a) == backward_.contains(&b) && a.recompute == b.recompute &&
           a.checkpoint == b.checkpoint;
  }

  // The input of the sum that is the gradient of an embedding; the later one of two.
  std::optional<size_t> find_embedding(const Node& add) const {
    std::optional<size_t> found;
    for (size_t side : {0, 1}) {
      const Value &value = *add.inputs.at(side), &rest = *add.inputs.at(1 - side);
      const Node* node = value.producer;
      if (!ir::is(node, "EmbeddingGrad", ir::kTorchOrtDomain)) continue;
      if (node->inputs.size() != 2 || value.uses.size() != 1 || memory_.is_written(&value) ||
          memory_.is_written(&rest) || value.type != rest.type || value.type.strides ||
          !region::has_kernel(&value, "Rows") || !are_together(*node, add)) {
        continue;
      }
      if (!found || position_.at(node) > position_.at(add.inputs[*found]->producer)) found = side;
    }
    return found;
  }

  void rewrite_embedding(Node& add, size_t side) {
    Node& old = *add.inputs[side]->producer;
    Node& made = ops::Writer(graph_, &add)
                     .copy(old, {old.inputs[0], old.inputs[1], add.inputs[1 - side]},
                           {old.outputs[0]->type});
    position_[&made] = position_.at(&add);
    if (backward_.contains(&add)) backward_.insert(&made);
    ir::replace_uses(*add.outputs[0], *made.outputs[0], graph_);
    ir::erase(graph_, add);
    ir::erase(graph_, old);
  }

  void rewrite(Node& add, const Term& first, const Term& second) {
    Node& old = *second.product;
    Node& product =
        ops::Writer(graph_, &old)
            .add_named(old.name, {"", "Gemm"}, {old.inputs[0], old.inputs[1], &first.matrix()},
                       {second.matrix().type});
    position_[&product] = position_.at(&old);
    if (backward_.contains(&old)) backward_.insert(&product);
    Value* sum = product.outputs[0];
    if (!second.views.empty()) {
      sum = ops::Writer(graph_, &add).reshape(sum, *add.outputs[0]->type.shape);
    }
    ir::replace_uses(*add.outputs[0], *sum, graph_);
    ir::erase(graph_, add);
    for (const Term* term : {&first, &second}) {
      for (Node* view : term->views) ir::erase(graph_, *view);
    }
    ir::erase(graph_, old);
  }

  Graph& graph_;
  SharedMemory memory_;
  std::unordered_set<const Node*> backward_;
  std::unordered_map<const Node*, size_t> position_;
};

}  // namespace

int accumulate_sums(Graph& graph, PassContext& context) { return Accumulator(graph).run(context); }

}  // namespace torch_ort::passes
