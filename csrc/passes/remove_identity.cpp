// y = Identity(x) -> x. An Identity is a copy, so it stays if a reader can tell the copy from x: by
// its strides, by a write into either, by a reader that depends on its memory, or because the
// caller holds one of the two.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/op.h"
#include "passes/context.h"
#include "passes/memory.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

// Whether x is a view of only a part of a tensor. If its copy were replaced by the view, all of the
// tensor would be live as long as the copy.
bool is_part_of_larger(const ir::Value& value) {
  const ir::Value* root = SharedMemory::root(&value);
  if (root == &value) return false;
  if (!root->type.shape || !value.type.shape) return true;
  return !(ir::numel(*root->type.shape) == ir::numel(*value.type.shape));
}

// Some operators name strides and an offset, which count from the beginning of a tensor's memory. A
// copy begins there, but a tensor of the caller's may be a view of something larger.
bool names_strides(const ir::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
    return ops::registry().operator_row(ops::key_of(node)).names_strides;
  });
}

// Whether each of the tensors whose memory x views has only the next one as its reader. Then
// nothing else sees this memory.
bool is_only_reader(const ir::Value& x) {
  const ir::Value* value = &x;
  while (value->uses.size() == 1 && value->producer != nullptr) {
    if (!ops::is_view(*value->producer)) return true;
    value = value->producer->inputs[0];
  }
  return false;
}

// Removes identities until what `memory` knows is no longer right; returns how many.
int remove_some(ir::Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  const bool keeps_copies_of_callers = names_strides(graph);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (!ir::is(&node, "Identity") || node.outputs[0] == nullptr) continue;
    ir::Value &x = *node.inputs[0], &y = *node.outputs[0];
    if (!(x.type == y.type)) continue;
    if (is_part_of_larger(x)) continue;
    if (memory.is_written(&x) || memory.is_written(&y)) continue;
    if (memory.leaves(&x)) continue;
    if (memory.is_callers(&x) && keeps_copies_of_callers) continue;
    // The caller may write to its tensor between the two halves.
    if (memory.is_callers(&x) && memory.has_yield()) continue;
    // An output must have memory of its own.
    if (memory.leaves(&y) && !is_only_reader(x)) continue;
    if (!context.may_rewrite()) return rewrites;

    const bool has_left = memory.leaves(&y);
    ir::replace_uses(y, x, graph);
    ir::erase(graph, node);
    ++rewrites;
    // Now x leaves the graph, which `memory` does not know.
    if (has_left) return rewrites;
  }
  return rewrites;
}

}  // namespace

int remove_identity(ir::Graph& graph, PassContext& context) {
  int rewrites = 0;
  // A copy may also become the only reader of a tensor when another copy goes.
  while (const int more = remove_some(graph, context)) rewrites += more;
  return rewrites;
}

}  // namespace torch_ort::passes
