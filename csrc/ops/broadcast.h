// Shapes of ops whose inputs are stretched to a common shape.
#pragma once

#include "ir/graph.h"

#include <optional>
#include <vector>

namespace torch_ort::ops {

// The common shape. Nothing if a shape is unknown, or if two different symbols meet: which of them
// is 1, if one is, shows at run time only. UserError if shapes do not fit.
std::optional<ir::Shape> broadcast(const ir::Node& node, const std::optional<ir::Shape>& a,
                                   const std::optional<ir::Shape>& b);
std::optional<ir::Shape> broadcast_inputs(const ir::Node& node);

// UserError if the inputs in `slots` have different dtypes; unknown ones fit all.
void want_same_dtype(const ir::Node& node, const std::vector<size_t>& slots);
// Row-major, on the device of the inputs: a scalar on the CPU goes with tensors of any device.
ir::Type type_like_inputs(const ir::Node& node, ir::DType dtype, std::optional<ir::Shape> shape);

}  // namespace torch_ort::ops
