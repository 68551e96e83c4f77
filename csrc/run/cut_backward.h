// Cuts the backward half of a training graph down to what the gradients of some of its outputs
// reach.
//
// Autograd does not run a node that gets no gradient. Zeros in place of a missing gradient would
// not do: they give zeros where there should be no gradient, and NaN where they meet an infinity.
#pragma once

#include "ir/graph.h"

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

struct CutBackward {
  struct Input {
    const ir::Value* value;  // of the whole graph
    bool is_zeros;           // zeros take its place, since it has no gradient
  };

  std::unique_ptr<ir::Graph> graph;  // has no YieldOp, and returns gradients
  std::vector<Input> inputs;         // the inputs of `graph`
  // By gradient of the whole graph: the output of `graph` that it is; -1: there is no gradient.
  std::vector<int> gradients;
};

// Cuts the backward half out. `whole` has a YieldOp. `defined` says for each result of the YieldOp,
// without those left out, whether there is a gradient.
CutBackward cut_backward(const ir::Graph& whole, const std::vector<bool>& defined);

// A training graph with a backward half cut down in this way. Its YieldOp leaves out the missing
// gradients.
struct CutTraining {
  std::unique_ptr<ir::Graph> graph;
  // By gradient of the whole graph: the output of `graph` that it is; -1: there is no gradient.
  std::vector<int> gradients;
  std::unordered_map<const ir::Value*, const ir::Value*> copies;  // by the value of the whole graph
};

// Returns nothing if zeros would have to replace a missing gradient, or if no gradient is left.
std::optional<CutTraining> cut_training(const ir::Graph& whole, const std::vector<bool>& defined);

}  // namespace torch_ort::run
