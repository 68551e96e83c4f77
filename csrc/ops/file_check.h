// The check of graphs that come from files. Passes, shape rules, lowerings and steps rely on what
// it establishes.
//
// A graph is checked once, when it is read. The types in a file remain claims, which a run compares
// with the results (SessionOptions::is_from_file): sizes and strides that no tensor can have, and
// views with other strides than their types claim, raise before memory is accessed.
#pragma once

#include "ir/graph.h"

#include <string>
#include <vector>

namespace torch_ort::ops {

// Checks every node of a graph from a file, and of the bodies in it. Sets the schema facts of ATen
// nodes (aten.h) from the schema, whatever the file says.
// Throws UserError if a node does not have the inputs, outputs and attributes of its op, or if it
// would run what a file may not run (permission.h) and `allow` does not permit it. An entry of
// `allow` is "*" (everything), a namespace ("mylib"), an operator ("mylib::scale") or an op
// ("com.microsoft.PythonOp").
void check_file(ir::Graph& graph, const std::vector<std::string>& allow);

}  // namespace torch_ort::ops
