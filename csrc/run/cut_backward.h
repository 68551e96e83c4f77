// The backward half of a training graph, cut down to what some of its outputs' gradients reach.
//
// Autograd runs no node that no gradient comes to. Zeros in the place of a gradient that is missing
// would give zeros where there has to be none, and NaN where they meet an infinity.
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
    bool is_zeros;           // in its place: no gradient has come to it
  };

  std::unique_ptr<ir::Graph> graph;  // without a YieldOp: gradients out
  std::vector<Input> inputs;         // of `graph`, in its order
  std::vector<int> gradients;        // by gradient of the whole: which output of `graph`; -1: none
};

// `whole` has a YieldOp. `defined`: by its result, those left out not counted, whether there is a
// gradient.
CutBackward cut_backward(const ir::Graph& whole, const std::vector<bool>& defined);

// The training graph whose backward half is so cut. Its YieldOp leaves out the other gradients.
struct CutTraining {
  std::unique_ptr<ir::Graph> graph;
  std::vector<int> gradients;  // by gradient of the whole: which output of `graph`; -1: none
  std::unordered_map<const ir::Value*, const ir::Value*> copies;  // of values of the whole
};

// Nothing where zeros would have to stand for a gradient that is missing, or no gradient is left.
std::optional<CutTraining> cut_training(const ir::Graph& whole, const std::vector<bool>& defined);

}  // namespace torch_ort::run
