// Which results are read, and erasing nodes that a rewrite has left without readers.
#pragma once

#include "ir/graph.h"

#include <cstddef>
#include <vector>

namespace torch_ort::passes {

// Whether the node has this output and something reads it.
bool is_read(const ir::Node& node, size_t output);

// Erases those of `nodes` whose results nothing reads. Readers are erased before the nodes that
// they read.
void erase_unread(ir::Graph& graph, const std::vector<ir::Node*>& nodes);

}  // namespace torch_ort::passes
