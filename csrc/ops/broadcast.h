// Shapes of ops that broadcast their inputs.
#pragma once

#include "ir/graph.h"

#include <optional>
#include <vector>

namespace torch_ort::ops {

// The broadcast shape. Nothing if a shape is unknown, or if two different symbols meet in a dim:
// only the run shows whether one of them is 1. Throws UserError if the shapes cannot be broadcast.
std::optional<ir::Shape> broadcast(const ir::Node& node, const std::optional<ir::Shape>& a,
                                   const std::optional<ir::Shape>& b);
std::optional<ir::Shape> broadcast_inputs(const ir::Node& node);
// The same, where a dim in which symbols meet is a new symbol, which a tensor of the run
// determines. Nothing only if a shape is unknown.
std::optional<ir::Shape> broadcast_with_symbols(const ir::Node& node);

// Throws UserError if the inputs in `slots` have different dtypes. Inputs of unknown dtype are
// accepted.
void want_same_dtype(const ir::Node& node, const std::vector<size_t>& slots);
// A row-major type. Its device is that of an input which is not on the CPU, if there is one:
// scalars on the CPU may be combined with tensors of any device.
ir::Type type_like_inputs(const ir::Node& node, ir::DType dtype, std::optional<ir::Shape> shape);

}  // namespace torch_ort::ops
