// The halves of a training graph: forward before the YieldOp, which is the border, and backward
// after it.
#pragma once

#include "ir/graph.h"

#include <unordered_set>
#include <vector>

namespace torch_ort::passes {

bool is_border(const ir::Node* node);

// The nodes after the border; none if there is no border.
std::unordered_set<const ir::Node*> backward_nodes(const ir::Graph& graph);
// The same in their order, without erased ones.
std::vector<ir::Node*> backward_half(ir::Graph& graph);

// Whether two nodes are in the same half, and are recomputed together if at all: each checkpoint is
// recomputed on its own. `backward`: the nodes of that half.
bool are_together(const std::unordered_set<const ir::Node*>& backward, const ir::Node& a,
                  const ir::Node& b);

}  // namespace torch_ort::passes
