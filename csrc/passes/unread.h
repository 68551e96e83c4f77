// Erases nodes that a rewrite has left without readers.
#pragma once

#include "ir/graph.h"

#include <vector>

namespace torch_ort::passes {

// Erases those of `nodes` whose results nothing reads. Readers are erased before the nodes that
// they read.
void erase_unread(ir::Graph& graph, const std::vector<ir::Node*>& nodes);

}  // namespace torch_ort::passes
