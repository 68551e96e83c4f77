// Who uses the memory of each tensor; internal to run/.
#pragma once

#include "run/compiled_graph.h"

#include <vector>

namespace torch_ort::run {

// Slots that share memory have one root, the slot whose memory it is.
struct RootUses {
  std::vector<std::vector<size_t>> readers;  // by root: the steps that read it
  std::vector<std::vector<int>> sharers;     // by root: the slots that share it, itself included
  std::vector<bool> leaves;  // by root: whether an output or a gradient of the graph shares it

  RootUses(const CompiledGraph& graph, const std::vector<int>& roots);
};

}  // namespace torch_ort::run
