// The halves of a training graph: before the YieldOp, the border, and behind it.
#pragma once

#include "ir/graph.h"

#include <unordered_set>

namespace torch_ort::passes {

// Which nodes stand behind the border; none if there is no border.
std::unordered_set<const ir::Node*> backward_nodes(const ir::Graph& graph);

}  // namespace torch_ort::passes
