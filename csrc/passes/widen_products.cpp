// Cast(MatMul(a, b)) of short floats to float32 -> torch_ort.WideMatMul, which does not round the
// sums. These are gradients of weights under autocast, whose parameters are float32. If the
// device's library has such products, this saves a launch and a tensor for each weight, and keeps
// the digits that the shorter dtype would lose. Products that regions read stay short: regions cast
// when they load, and the longer numbers would be twice as many bytes.

#include "ir/edit.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/memory.h"
#include "region/codegen.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::DType;
using ir::Value;

bool is_short_matrix(const Value* value) {
  if (value == nullptr || !value->type.is_known() || value->type.shape->size() != 2) return false;
  return ir::is_short_float(value->type.dtype);
}

// Whether the value is only returned, or added to a value that is returned, as the gradients of a
// weight that is used twice are.
bool leaves(const Value& value) {
  return std::all_of(value.uses.begin(), value.uses.end(), [](const ir::Use& use) {
    if (use.node == nullptr) return true;
    return ir::is(use.node, "Add") && leaves(*use.node->outputs[0]);
  });
}

// The product whose result only this cast reads.
const ir::Node* widened(const ir::Node& cast, const SharedMemory& memory) {
  if (!ir::is(&cast, "Cast") || cast.outputs[0] == nullptr) return nullptr;
  if (cast.outputs[0]->type.dtype != DType::kFloat || !leaves(*cast.outputs[0])) return nullptr;
  const Value& product = *cast.inputs[0];
  if (!ir::is(product.producer, "MatMul") || product.uses.size() != 1) return nullptr;
  const auto& factors = product.producer->inputs;
  const bool fits = std::all_of(factors.begin(), factors.end(), is_short_matrix) &&
                    region::has_wide_products(&product) && !memory.is_written(&product);
  return fits ? product.producer : nullptr;
}

}  // namespace

int widen_products(ir::Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    const ir::Node* product = widened(node, memory);
    if (product == nullptr) continue;
    if (!context.may_rewrite()) return rewrites;
    ops::Writer write(graph, &node);
    Value* wide = write.make_ours("WideMatMul", product->inputs, node.outputs[0]->type);
    ir::replace_uses(*node.outputs[0], *wide, graph);
    ir::Node& old = *node.inputs[0]->producer;
    ir::erase(graph, node);
    ir::erase(graph, old);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
