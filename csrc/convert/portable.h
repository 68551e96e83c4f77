// Rewrites of a graph that is about to be written to a file, so that other programs can read it.
// The engine does not run the result, whose numbers may differ from the engine's in the last bits.
#pragma once

#include "ir/graph.h"

namespace torch_ort::convert {

// Replaces ATen nodes by standard nodes of opsets up to `max_opset`, where a few of these compute
// the same. Returns the number of nodes that it replaced; the others stay. Also removes the strides
// from all types, since they describe PyTorch's kernels.
int spell_out(ir::Graph& graph, int max_opset);

// Replaces torch_ort.Dims by Shape, Gather, arithmetic and Concat. A symbol is read from the shape
// of an input; a symbol that is in no input's shape becomes a 0-d input. Nodes with unbacked
// symbols or with conditions stay.
int expand_sizes(ir::Graph& graph);

}  // namespace torch_ort::convert
