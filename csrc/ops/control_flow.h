// If and Loop. In a graph they are ONNX's: their bodies name values of the graphs around them. What
// runs is the same node in our domain with *closed* bodies (passes/close_bodies.cpp): it takes
// those values as inputs after its own, and each body has an input for every one of them.
#pragma once

#include "ir/graph.h"

#include <unordered_set>

namespace torch_ort::ops {

bool is_control_flow(const ir::Node& node);  // standard or closed
bool is_closed(const ir::Node& node);        // torch_ort.If or torch_ort.Loop

// The inputs of a node that stand before what its bodies name: a condition, or rounds, a condition
// and the first values of what is carried from round to round.
size_t num_own_inputs(const ir::Node& node);
// Of these, the values that a Loop carries; 0 for an If.
size_t num_carried(const ir::Node& node);

// UserError unless the bodies of a closed node take what it gives them, and give what it gives.
void check_bodies(const ir::Node& node);

// All symbols that a graph and the bodies in it mention.
std::unordered_set<std::string> symbols_of(const ir::Graph& graph);
void collect_symbols(const ir::Type& type, std::unordered_set<std::string>& symbols);

// What two ways to a value have in common. `name` is the value's: a dim in which they differ, or of
// a symbol that is not in `known`, gets a symbol called after it.
ir::Type common_type(const ir::Node& node, const std::string& name, const ir::Type& a,
                     const ir::Type& b, const std::unordered_set<std::string>& known);

}  // namespace torch_ort::ops
