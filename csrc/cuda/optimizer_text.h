// The source texts of optimizer.cpp's kernels: prelude.cuh and optimizer.cuh, instantiated for
// dtypes.
#pragma once

#include "cuda/optimizer.h"

#include <string>
#include <vector>

namespace torch_ort::cuda {

struct OptimizerText {
  std::string name;  // the name of the text and of its first kernel
  std::string text;
};

const char* optimizer_prelude();  // optimizer.cuh

// The kernels write_words, begin_step and lamb_rates, which do not depend on dtypes.
OptimizerText begin_text();
// The kernel that sums the squares of the gradients of each chunk.
OptimizerText squares_text(ir::DType gradient);
// The kernel of the update. LAMB has a second one, <name>_move.
OptimizerText update_text(OptimizerRule rule, const std::vector<ir::DType>& dtypes);

}  // namespace torch_ort::cuda
