// Dropout on a GPU -> a Dropout that gives its mask alone, and the product with this mask, which
// regions compute. So the mask is drawn by the kernel that eager PyTorch's dropout runs there: it
// takes its random numbers in an order that depends on the dtype, the strides and the address of
// the input, and no other kernel draws the same mask. On the CPU eager PyTorch draws by
// aten::bernoulli_, as expand_composites does. Runs under the option exact_random alone.

#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/dropout.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// Whether expand_composites would draw the mask by another kernel.
bool is_expanded(const Node& node) {
  return dropout_ratio(node) && is_fusible_float(node.inputs[0]) &&
         !ir::is_host(node.inputs[0]->type.device) && !node.outputs.empty() &&
         node.outputs[0] != nullptr;
}

// A Dropout in front of `node` that draws its mask.
Value& draw(Graph& graph, Node& node) {
  ir::Type type = node.outputs[0]->type;
  type.dtype = ir::DType::kBool;
  Value& mask = ir::add_value(graph, node.name + "_mask", type);
  Node& made = ir::append_producer(graph, node.op, node.inputs, {nullptr, &mask}, node.attrs,
                                   node.name + "_draw");
  made.origin = node.origin;
  made.recompute = node.recompute;
  made.checkpoint = node.checkpoint;
  made.captured = node.captured;
  ir::move_before(graph, made, node);
  return mask;
}

// The elements of the input that the mask keeps, scaled. PyTorch's backward kernel computes it.
Value& keep(Graph& graph, Node& node, Value& mask) {
  ops::Writer write(graph, &node);
  const ir::Attrs attrs = {
      {"operator", std::string(ops::aten::kDropoutBackward)},
      {"overload_name", std::string()},
      {"scale", 1.0 / (1.0 - *dropout_ratio(node))},
      {"tensor_args", std::vector<std::string>{"grad_output", "mask"}},
  };
  return *write
              .add_named(node.name, {ir::kAtenDomain, "ATen"}, {node.inputs[0], &mask},
                         {node.outputs[0]->type}, attrs)
              .outputs[0];
}

}  // namespace

int draw_as_eager(Graph& graph, PassContext& context) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !is_expanded(node)) continue;
    if (!context.may_rewrite()) return rewrites;
    Value& mask = draw(graph, node);
    if (is_read(node, 0)) ir::replace_uses(*node.outputs[0], keep(graph, node, mask), graph);
    if (is_read(node, 1)) ir::replace_uses(*node.outputs[1], mask, graph);
    ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
