// Expresses norms, softmax, losses, activations and dropout, and their backward operators, in the
// small language of fused regions (ops/fusion.h), so that fuse_regions can fuse them with the nodes
// around them. Only where a region can run them: for floating-point tensors of known rank on a
// device with a code generator. The rows are in composites/, by family.

#include "ir/edit.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/context.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
bool has_no_elements(const ir::Value& value) {
  if (!value.type.shape) return false;
  return std::find(value.type.shape->begin(), value.type.shape->end(), ir::Dim(0)) !=
         value.type.shape->end();
}

const composites::Expansion* find_expansion(const Node& node) {
  if (node.is_erased() || node.inputs.empty() || node.inputs[0] == nullptr) return nullptr;
  // A node without elements stays as it is: a step of its expansion, such as the largest of no
  // numbers, might be undefined where the operator itself is not.
  if (has_no_elements(*node.inputs[0])) return nullptr;
  const std::string op = kind_of(node);
  for (const auto family :
       {composites::activations(), composites::batch_norms(), composites::element_losses(),
        composites::group_norms(), composites::kernels(), composites::losses(), composites::norms(),
        composites::pointwise()}) {
    for (const composites::Expansion& row : family) {
      if (row.op == op) return &row;
    }
  }
  return nullptr;
}

}  // namespace

int expand_composites(Graph& graph, PassContext& context) {
  int rewrites = 0;
  for (auto node = graph.nodes.begin(); node != graph.nodes.end(); ++node) {
    const composites::Expansion* expansion = find_expansion(*node);
    if (expansion == nullptr) continue;
    if (!context.may_rewrite()) return rewrites;
    if (!expansion->expand(graph, *node)) {
      context.did_not_rewrite();
      continue;
    }
    ir::erase(graph, *node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
