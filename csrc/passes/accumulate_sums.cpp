// Sums whose last term can be added where the rest of the sum is:
//
//   Add(MatMul(a, b), MatMul(c, d))     -> Gemm(c, d, MatMul(a, b))
//                                          MatMulAdd(c, d, MatMul(a, b)) of batches
//   Add(x, EmbeddingGrad(gradient, ids)) -> EmbeddingGrad(gradient, ids, x)
//
// These are gradients of what is used several times: of a weight in each step of a recurrent layer,
// of the tensor that queries, keys and values are projected from, of features of which the products
// of all pairs are taken, or of a table of embeddings that is also the weight of the last layer.
// The kernel reads the numbers that it starts from where it writes its result, so that one tensor
// serves the whole sum. The separate terms would all be alive until they are added, and would be
// read once more; those of an embedding are mostly zeros.
//
// Both products may be transposed or viewed before they are added; the transpose of a product is
// computed as the product of the transposed factors. Declines unless the sum is the only reader of
// what goes into it, and all are in the same half and are recomputed together if at all. Only for
// devices whose products and gradients of embeddings are the engine's own and can start from a
// tensor: the products of libraries copy it first.

#include "ir/edit.h"
#include "ops/writer.h"
#include "passes/attention_words.h"
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

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// An operand of an Add that is a product of two matrices, or a view of one; or products of as many
// matrices as a batch has.
struct Term {
  Node* product = nullptr;  // nullptr: the operand is something else
  bool is_turned = false;   // the product is transposed first
  std::vector<Node*> views;

  Value& matrix() const { return *product->outputs[0]; }
  Shape shape() const {
    const Shape& shape = *matrix().type.shape;
    const Dim &rows = attention::last(shape, 2), &columns = attention::last(shape, 1);
    return is_turned ? attention::with_matrix(shape, columns, rows) : shape;
  }
};

// Whether the type is that of matrices, with or without a batch dim.
bool is_float_matrix(const Type& type) {
  return type.is_known() && (type.shape->size() == 2 || type.shape->size() == 3) &&
         ir::is_float(type.dtype);
}

bool has_plain_factors(const Node& product) {
  const Type& result = product.outputs[0]->type;
  for (size_t i : {0, 1}) {
    const Type& type = product.inputs.at(i)->type;
    if (!is_float_matrix(type) || type.dtype != result.dtype ||
        type.shape->size() != result.shape->size() ||
        (type.shape->size() == 3 && type.shape->front() != result.shape->front())) {
      return false;
    }
  }
  return true;
}

// The transposes of matrices.
Value* turned(ops::Writer& write, Value* matrices) {
  if (attention::swaps_last_dims(matrices->producer)) return matrices->producer->inputs[0];
  return write.transpose(matrices, attention::swapped_order(matrices->type.shape->size()));
}

bool keeps_shape(const Node& node) {
  return node.inputs[0]->type.shape == node.outputs[0]->type.shape;
}

bool is_product(const Node& node) {
  return ir::is(&node, "MatMul") || ir::is(&node, "Gemm") ||
         ir::is(&node, "MatMulAdd", ir::kTorchOrtDomain);
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
      if (is_product(*node)) {
        const bool is_sum = !ir::is(node, "MatMul");
        const bool is_known = is_float_matrix(value->type) && has_plain_factors(*node);
        if (is_known && !(is_sum && term.is_turned)) term.product = node;
        return term;
      }
      if (!term.is_turned && is_float_matrix(value->type) && attention::swaps_last_dims(node)) {
        term.is_turned = true;
      } else if (!ir::is(node, "Reshape") || (term.is_turned && !keeps_shape(*node))) {
        return term;  // a transpose must be that of the product itself
      }
      term.views.push_back(node);
      value = node->inputs[0];
    }
    return term;
  }

  bool fits(const Node& add, const Term& first, const Term& second) const {
    const Type &sum = add.outputs[0]->type, &type = second.matrix().type;
    return ir::is(second.product, "MatMul") && first.matrix().type.dtype == type.dtype &&
           first.shape() == second.shape() && !first.matrix().type.strides && !type.strides &&
           sum.is_known() && sum.dtype == type.dtype && !sum.strides &&
           sum.shape == add.inputs[0]->type.shape && sum.shape == add.inputs[1]->type.shape &&
           region::has_kernel(&second.matrix(), "Rows") && are_together(*first.product, add) &&
           are_together(*second.product, add);
  }

  bool are_together(const Node& a, const Node& b) const {
    return passes::are_together(backward_, a, b);
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

  // The node in place of a product, which begins with `start` or, if that is nullptr, with zero.
  Node& write(const Term& term, Value* start) {
    Node& old = *term.product;
    ops::Writer write(graph_, &old);
    const Shape shape = term.shape();
    std::vector<Value*> operands = {old.inputs[0], old.inputs[1]};
    if (term.is_turned) {
      operands = {turned(write, old.inputs[1]), turned(write, old.inputs[0])};
    }
    ir::OpId op = old.op;
    if (start != nullptr) {
      op = shape.size() == 2 ? ir::OpId{"", "Gemm"} : ir::OpId{ir::kTorchOrtDomain, "MatMulAdd"};
      operands.push_back(start);
    }
    Type type = old.outputs[0]->type;
    type.shape = shape;
    Node& product = write.add_named(old.name, std::move(op), std::move(operands), {type});
    position_[&product] = position_.at(&old);
    if (backward_.contains(&old)) backward_.insert(&product);
    return product;
  }

  void rewrite(Node& add, const Term& first, const Term& second) {
    Node& old = *second.product;
    Value* start = &first.matrix();
    if (first.is_turned) start = write(first, nullptr).outputs[0];
    Node& product = write(second, start);
    Value* sum = product.outputs[0];
    if (sum->type.shape != add.outputs[0]->type.shape) {
      sum = ops::Writer(graph_, &add).reshape(sum, *add.outputs[0]->type.shape);
    }
    ir::replace_uses(*add.outputs[0], *sum, graph_);
    ir::erase(graph_, add);
    for (const Term* term : {&first, &second}) {
      for (Node* view : term->views) ir::erase(graph_, *view);
    }
    if (first.is_turned) ir::erase(graph_, *first.product);
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
