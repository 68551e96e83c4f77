// The groups of nodes of which fuse_regions would make regions, for passes that estimate costs.
#pragma once

#include "region/spaces.h"

#include <cstddef>
#include <vector>

namespace torch_ort::passes {

// Limits for one region. Beyond them the values of a tile no longer fit into the first-level cache.
constexpr size_t kMaxNodes = 96;
constexpr size_t kMaxInputs = 32;

// The device on which regions run: that of the first value that is not on the host, or the host.
ir::Device device_of_regions(const ir::Graph& graph);

struct RegionGroup {
  std::vector<region::Member> nodes;  // in order
  ir::Dim elements, columns;
};

// Does not change the graph.
std::vector<RegionGroup> region_groups(ir::Graph& graph);

}  // namespace torch_ort::passes
