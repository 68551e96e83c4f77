// Integers that nodes read: shapes, axes, bounds.
#pragma once

#include "ir/graph.h"

namespace torch_ort::passes {

// As a tensor: an initializer, or, where a call tells them, a torch_ort.Dims node in front of
// `before`; nullptr: at the end of the graph.
ir::Value* make_ints(ir::Graph& graph, const ir::Shape& dims, ir::Node* before);

}  // namespace torch_ort::passes
