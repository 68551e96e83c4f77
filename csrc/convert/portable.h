// Rewrites of a graph that is about to be written into a file: afterwards other programs can read
// it. Numbers may differ in the last bits from those of the engine, which never runs the result.
#pragma once

#include "ir/graph.h"

namespace torch_ort::convert {

// ATen nodes -> standard nodes of the given opset, where a few of them say the same.
// Gives the number of nodes that it replaced; the others stay. Strides, which are those of
// PyTorch's kernels, are forgotten.
int spell_out(ir::Graph& graph, int max_opset);

// torch_ort.Dims -> Shape, Gather, arithmetic and Concat. A symbol is read from the shape of an
// input; one that no shape tells becomes an input without dims.
// Nodes with symbols that only data tells, or with conditions, stay.
int expand_sizes(ir::Graph& graph);

}  // namespace torch_ort::convert
