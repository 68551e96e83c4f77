// What cut_backward is asked for, and what it reports.
#pragma once

#include <string>
#include <vector>

namespace torch_ort::passes {

// The gradients of some outputs of a training graph come, and those of others do not. Autograd does
// not run a node that gets no gradient. Zeros in place of a missing gradient would not do: they
// give zeros where there should be no gradient, and NaN where they meet an infinity. So the
// backward half is cut down to what the gradients that come reach.
struct Cut {
  // By result of the YieldOp, without those that it leaves out: whether there is a gradient.
  std::vector<bool> defined;
  // Whether the forward half and the YieldOp go as well. What backward reads of it, and the
  // gradients that come, are then the inputs of the graph, under their names.
  bool is_half_alone = false;

  // The following are reported.
  // By gradient of the graph as it was: the output that it is now; -1: there is no gradient.
  std::vector<int> gradients;
  // Inputs that were added, for which zeros are to be passed: some node reads a gradient that does
  // not come beside one that does.
  std::vector<std::string> zeros;
};

}  // namespace torch_ort::passes
