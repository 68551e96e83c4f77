// wait(start(a)) + wait(start(b)) -> wait(start(a + b))
//
// where both are sums or means over the same ranks: all_reduce, or reduce_scatter_tensor. A tensor
// that is read by several products with split weights, as that of an attention is, gets a gradient
// from each, and each is summed over the ranks by itself. One sum moves a part of the bytes. Only
// if nothing else reads what is summed; the sum stands where both results were added.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/collective.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/memory.h"

#include <array>
#include <optional>
#include <string>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

struct Summed {
  Node *start, *wait;
};

Node* only_reader(const Value* value) {
  return value != nullptr && value->uses.size() == 1 ? value->uses[0].node : nullptr;
}

// The collective whose result `value` is, if it is linear and `reader` alone reads it.
std::optional<Summed> summed(const Value* value, const Node& reader) {
  if (value == nullptr || value->producer == nullptr || only_reader(value) != &reader)
    return std::nullopt;
  Node* wait = value->producer;
  if (ops::collective_of(*wait) == nullptr) return std::nullopt;
  Node* start = wait->inputs[0]->producer;
  if (start->inputs.size() != 1 || only_reader(start->outputs[0]) != wait) return std::nullopt;
  const std::string op = ops::key_of(*start);
  const std::string reduction = ir::string_attr(start->attrs, "reduce_op", "");
  const bool is_linear =
      op == "_c10d_functional::all_reduce" || op == "_c10d_functional::reduce_scatter_tensor";
  if (!is_linear || (reduction != "sum" && reduction != "avg")) return std::nullopt;
  return Summed{start, wait};
}

bool join(Graph& graph, Node& add, const SharedMemory& memory, PassContext& context) {
  if (!ir::is(&add, "Add") || add.inputs.size() != 2) return false;
  const auto first = summed(add.inputs[0], add), second = summed(add.inputs[1], add);
  if (!first || !second || first->start == second->start) return false;
  Value *a = first->start->inputs[0], *b = second->start->inputs[0];
  if (first->start->attrs != second->start->attrs || !(a->type == b->type)) return false;
  // They are read later than before.
  if (memory.is_written(a) || memory.is_written(b)) return false;
  if (!a->type.is_known() || !context.may_rewrite()) return false;
  ops::Writer write(graph, &add);
  const Node& sum = write.add({"", "Add"}, {a, b}, {ops::with_shape(a->type, a->type.shape)});
  const Node& start = write.copy(*first->start, {sum.outputs[0]}, {first->start->outputs[0]->type});
  const Node& wait = write.copy(*first->wait, {start.outputs[0]}, {first->wait->outputs[0]->type});
  ir::replace_uses(*add.outputs[0], *wait.outputs[0], graph);
  ir::erase(graph, add);
  for (const Summed& each : {*first, *second}) {
    ir::erase(graph, *each.wait);
    ir::erase(graph, *each.start);
  }
  return true;
}

}  // namespace

int join_collectives(Graph& graph, PassContext& context) {
  if (!ops::has_collectives(graph)) return 0;
  const SharedMemory memory(graph);
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (!node.is_erased() && join(graph, node, memory, context)) ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
