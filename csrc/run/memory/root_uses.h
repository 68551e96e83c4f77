// Who uses the memory of each tensor; internal to run/.
#pragma once

#include "run/describe.h"

#include <optional>
#include <vector>

namespace torch_ort::run {

// Slots that share memory have one root, the slot whose memory it is. This says who uses the roots
// of a description; it looks at sizes and strides when it is asked.
class RootUses {
 public:
  std::vector<std::vector<size_t>> readers;  // by root: the steps that read it
  std::vector<std::vector<int>> sharers;     // by root: the slots that share it, itself included
  std::vector<bool> leaves;  // by root: whether an output or a gradient of the graph shares it

  RootUses(const CompiledGraph& graph, const Description& description);

  // The step that writes a root whose memory may be laid out in another way, since its size is
  // known and nobody but the steps sees it; nullptr if there is none.
  const Step* maker_of(int root) const;
  // The specs of the sharers of a dense root, if the root had these strides. Nothing if no strides
  // describe one of the sharers then.
  std::optional<std::vector<TensorSpec>> with_strides(int root,
                                                      const std::vector<int64_t>& strides) const;

 private:
  const CompiledGraph& graph_;
  const Description& description_;
};

}  // namespace torch_ort::run
