// If and Loop. A captured graph has the ops of ONNX, whose bodies refer to values of the graphs
// around them by name. What runs is the op of the same name in the domain torch_ort, whose bodies
// are *closed* (passes/close_bodies.cpp): the node takes those outer values as additional inputs,
// and each body has an input for every one of them.
#pragma once

#include "ir/graph.h"

#include <unordered_set>

namespace torch_ort::ops {

bool is_control_flow(const ir::Node& node);  // an If or a Loop, standard or closed
bool is_closed(const ir::Node& node);        // torch_ort.If or torch_ort.Loop

// How many inputs of a node come before the outer values: the condition of an If; the trip count,
// the condition and the initial values of the carried variables of a Loop.
size_t num_own_inputs(const ir::Node& node);
// How many variables a Loop carries from one iteration to the next; 0 for an If.
size_t num_carried(const ir::Node& node);

// Throws UserError unless the bodies of a closed node take the inputs and return the outputs that
// the node passes and expects.
void check_bodies(const ir::Node& node);

// All symbols that occur in a graph and in its bodies.
std::unordered_set<std::string> symbols_of(const ir::Graph& graph);
// Those in the attributes of a node, in its bodies, and in the types of its results.
std::unordered_set<std::string> symbols_of(const ir::Node& node);
void collect_symbols(const ir::Type& type, std::unordered_set<std::string>& symbols);

// The type that a value has whichever of two branches made it. `name` is the value's name. A dim in
// which the branches differ, or that has a symbol which is not in `known`, gets a new symbol that
// is named after the value.
ir::Type common_type(const ir::Node& node, const std::string& name, const ir::Type& a,
                     const ir::Type& b, const std::unordered_set<std::string>& known);

}  // namespace torch_ort::ops
