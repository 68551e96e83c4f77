// Who uses the memory of each tensor; internal to run/.
#pragma once

#include "run/compiled_graph.h"
#include "run/spec.h"

#include <optional>
#include <vector>

namespace torch_ort::run {

// Slots that share memory have one root, the slot whose memory it is.
struct RootUses {
  std::vector<std::vector<size_t>> readers;  // by root: the steps that read it
  std::vector<std::vector<int>> sharers;     // by root: the slots that share it, itself included
  std::vector<bool> leaves;  // by root: whether an output or a gradient of the graph shares it

  RootUses(const CompiledGraph& graph, const std::vector<int>& roots);

  // The specs of the sharers of a dense root, if the root had these strides. `specs` are those of
  // all slots. Nothing if no strides describe one of the sharers then.
  std::optional<std::vector<TensorSpec>> with_strides(int root, const std::vector<int64_t>& strides,
                                                      const std::vector<TensorSpec>& specs) const;
};

}  // namespace torch_ort::run
