// Nodes that a rewrite has left without a reader.
#pragma once

#include "ir/graph.h"

#include <vector>

namespace torch_ort::passes {

// Erases those of `nodes` that nothing reads any more; a node goes after its readers.
void erase_unread(ir::Graph& graph, const std::vector<ir::Node*>& nodes);

}  // namespace torch_ort::passes
