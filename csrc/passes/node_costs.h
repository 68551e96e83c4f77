// Estimates the time of nodes from the speeds of the machine.
#pragma once

#include "ir/graph.h"
#include "passes/budget.h"

namespace torch_ort::passes {

// The microseconds that it takes to run a node again. `is_in_region`: the node runs inside of a
// region, so its inputs and results are not moved to and from memory. Where sizes are symbols,
// those of the captured call are taken.
double micros_of(const ir::Graph& graph, const ir::Node& node, bool is_in_region,
                 const Speeds& speeds);

}  // namespace torch_ort::passes
