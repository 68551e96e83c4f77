// A region as a graph of nodes that run one by one. Kernels are checked against it, and it runs
// where there is no generator.
#pragma once

#include "ir/graph.h"

#include <memory>

namespace torch_ort::region {

// The inputs of the returned graph are the operands of the node and the values of all symbols in
// the body; its outputs are those of the region. Floating-point values narrower than `precision`
// are computed and returned in that dtype, and rounded on the way where region/rounded.h says so;
// with kUndefined each node rounds to its own type. A
// random mask remains a region of one node, since its values depend on rows and columns.
// Throws InternalError if the node is not a region.
std::unique_ptr<ir::Graph> lower(const ir::Node& region, ir::DType precision);

// Whether the region is a single random mask, which can only run as a kernel.
bool is_mask(const ir::Node& region);

}  // namespace torch_ort::region
