// One step of an optimizer over many parameters at once: each is read and written once.
#pragma once

#include "cpu/kernels.h"

#include <vector>

namespace torch_ort::cpu {

struct Array {
  void* data = nullptr;
  ir::DType dtype = ir::DType::kUndefined;
};

// The arrays of one parameter have as many elements each, in the same order in memory.
template <typename Rule>
struct Update {
  std::vector<Array> arrays;  // parameter, gradient (which is only read), states
  int64_t count = 0;          // of elements of each
  Rule rule;
};

// Computes in float64 where all arrays of a parameter hold it, else in float32. InternalError on
// other arrays than those of float32, bfloat16, float16, or all float64. Runs on the threads of
// ATen; the results are the same for any number of these.
// SGD has one state if there is momentum; Adam has mean, mean of squares, and the largest of the
// latter for amsgrad; LAMB has mean and mean of squares.
void run(const std::vector<Update<SgdRule>>& updates, Isa isa);
void run(const std::vector<Update<AdamRule>>& updates, Isa isa);
void run(const std::vector<Update<LambRule>>& updates, Isa isa);

struct Numbers {
  Array array;
  int64_t count = 0;
};

// Of all numbers, summed in float64, on arrays and with errors as above.
double sum_squares(const std::vector<Numbers>& all, Isa isa);

}  // namespace torch_ort::cpu
