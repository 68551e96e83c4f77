// Integers that nodes read, and those that weigh what is faster.
#pragma once

#include "ir/graph.h"

#include <optional>

namespace torch_ort::passes {

// As a tensor: an initializer, or, where a call tells them, a torch_ort.Dims node in front of
// `before`; nullptr: at the end of the graph.
ir::Value* make_ints(ir::Graph& graph, const ir::Shape& dims, ir::Node* before);

// A size in the call that was captured; nothing if no hint of the graph tells.
std::optional<int64_t> hinted_size(const ir::Graph& graph, const ir::Dim& dim);

}  // namespace torch_ort::passes
