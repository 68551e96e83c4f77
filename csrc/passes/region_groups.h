// What fuse_regions would make a region of, for passes that weigh what a region costs.
#pragma once

#include "region/spaces.h"

#include <cstddef>
#include <vector>

namespace torch_ort::passes {

// Beyond these a tile no longer fits into the first cache, or a region into a reader's head.
constexpr size_t kMaxNodes = 96;
constexpr size_t kMaxInputs = 32;
// Node::checkpoint of a node that no checkpoint has tagged. Below it stand nodes that a memory budget
// has run again: those of one number may be joined, with each other alone.
constexpr int kNoCheckpoint = -1;

// That of the first value which is not on the host; the host if all are there.
ir::Device device_of_regions(const ir::Graph& graph);

struct RegionGroup {
  std::vector<region::Member> nodes;  // in order
  ir::Dim elements, columns;
};

// Changes nothing.
std::vector<RegionGroup> region_groups(ir::Graph& graph);

}  // namespace torch_ort::passes
