// The door for graphs from files: what passes, shape rules, lowerings and steps count on.
#pragma once

#include "ir/graph.h"

#include <string>
#include <vector>

namespace torch_ort::ops {

// Checks all nodes of a graph from a file, and of the bodies in it. Facts that nodes of operators
// carry are those of the schema afterwards, whatever the file says.
// UserError if a node does not have the inputs, outputs and attributes of its op, or if it runs
// what a file may not run (permission.h) and what `allow` does not name: "*" (everything), a
// namespace ("mylib"), an operator ("mylib::scale") or an op ("com.microsoft.PythonOp").
void check_file(ir::Graph& graph, const std::vector<std::string>& allow);

}  // namespace torch_ort::ops
