// The body of a region as a graph of nodes that run one by one: what a kernel of the region is
// checked against, and what runs where no generator makes one.
#pragma once

#include "ir/graph.h"

#include <memory>

namespace torch_ort::region {

// Takes the operands of the node, and the values of all symbols that the body mentions; gives its
// results. Floating-point numbers narrower than `precision` are computed, and given, in that dtype;
// kUndefined: each node rounds as its types say. Random masks come from regions of a single node,
// for they are defined by the rows and columns that they are drawn in.
// InternalError if the node is no region.
std::unique_ptr<ir::Graph> lower(const ir::Node& region, ir::DType precision);

// Whether the region is one mask, which has no other form than a kernel.
bool is_mask(const ir::Node& region);

}  // namespace torch_ort::region
