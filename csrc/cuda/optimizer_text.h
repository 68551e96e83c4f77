// The texts of optimizer.cpp's kernels: optimizer.cuh behind prelude.cuh, for certain dtypes.
#pragma once

#include "cuda/optimizer.h"

#include <string>
#include <vector>

namespace torch_ort::cuda {

struct OptimizerText {
  std::string name;  // of the text, and of its first kernel
  std::string text;
};

const char* optimizer_prelude();  // optimizer.cuh

// Kernels write_words, begin_step and lamb_rates, which know no dtype.
OptimizerText begin_text();
// Sums of squares of the gradients of each chunk.
OptimizerText squares_text(ir::DType gradient);
// The update; that of LAMB has a second kernel, <name>_move.
OptimizerText update_text(OptimizerRule rule, const std::vector<ir::DType>& dtypes);

}  // namespace torch_ort::cuda
