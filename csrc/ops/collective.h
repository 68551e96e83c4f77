// Communication between ranks in a graph, which PyTorch's operators of `_c10d_functional` do. One
// of them starts it and gives results that are complete only when another, `wait_tensor`, has
// waited for them. Until then the communication is in flight: it reads the operands and writes the
// results while other nodes run.
#pragma once

#include "ir/graph.h"

#include <string_view>

namespace torch_ort::ops {

inline constexpr const char* kWaitTensor = "_c10d_functional::wait_tensor";

// Whether an operator starts a collective whose results have memory of their own.
bool starts_collective(std::string_view op);

// The same of a node.
bool is_collective(const ir::Node& node);
// Whether a node starts to gather one tensor of all ranks.
bool is_gather(const ir::Node& node);
bool is_wait(const ir::Node& node);
bool has_collectives(const ir::Graph& graph);

// The node whose result a wait is for; nullptr if it is for something else.
const ir::Node* collective_of(const ir::Node& wait);

}  // namespace torch_ort::ops
