// Cast(Cast(x)) to a shorter float and back -> Identity(x), which remove_identity removes. Autocast
// makes such pairs where a gradient in float32, such as that of a bias, is cast to the dtype of the
// forward half and then to that of the parameter. Regions keep the digits of the values inside of
// them; this keeps digits between regions too. Other readers of the shorter value still read that.
// The pass works within one half of a training graph, since otherwise the longer value would be
// saved for backward instead of the shorter one.

#include "ir/edit.h"
#include "ops/writer.h"
#include "passes/context.h"
#include "passes/halves.h"

namespace torch_ort::passes {

namespace {

using ir::DType;

bool is_cast(const ir::Node* node) { return ir::is(node, "Cast") && node->outputs[0] != nullptr; }

bool is_round_trip(const ir::Node& narrow, const ir::Node& widen) {
  const DType from = narrow.inputs[0]->type.dtype, to = widen.outputs[0]->type.dtype;
  return from == to && (from == DType::kFloat || from == DType::kDouble) &&
         ir::is_short_float(narrow.outputs[0]->type.dtype);
}

}  // namespace

int drop_round_trips(ir::Graph& graph, PassContext& context) {
  const std::unordered_set<const ir::Node*> backward = backward_nodes(graph);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (node.is_erased() || !is_cast(&node)) continue;
    ir::Node* narrow = node.inputs[0]->producer;
    if (!is_cast(narrow) || !is_round_trip(*narrow, node)) continue;
    if (backward.contains(narrow) != backward.contains(&node)) continue;
    if (!context.may_rewrite()) return rewrites;
    ops::Writer write(graph, &node);
    // Of the type of the cast: its elements may be in another order in memory than those of x.
    const ir::Node& same =
        write.add({"", "Identity"}, {narrow->inputs[0]}, {node.outputs[0]->type});
    ir::replace_uses(*node.outputs[0], *same.outputs[0], graph);
    ir::erase(graph, node);
    if (narrow->outputs[0]->uses.empty()) ir::erase(graph, *narrow);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
