// What it takes to run a node, by the speeds of the machine.
#pragma once

#include "ir/graph.h"
#include "passes/budget.h"

namespace torch_ort::passes {

// Microseconds that a node takes once more. `is_in_region`: it
// runs between others of one region, and what it reads and makes does not come to memory. Where
// sizes are symbols, in the call that was captured.
double micros_of(const ir::Graph& graph, const ir::Node& node, bool is_in_region,
                 const Speeds& speeds);

}  // namespace torch_ort::passes
