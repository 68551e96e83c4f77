// Optimizer steps over many parameters at once. Each parameter is read and written once.
#pragma once

#include "cpu/kernels.h"

#include <vector>

namespace torch_ort::cpu {

struct Array {
  void* data = nullptr;
  ir::DType dtype = ir::DType::kUndefined;
};

// The update of one parameter. Its arrays have the same number of elements in the same order in
// memory.
template <typename Rule>
struct Update {
  std::vector<Array> arrays;  // the parameter, its gradient (only read), its states
  int64_t count = 0;          // elements in each array
  Rule rule;
};

// Runs updates on the threads of ATen. They compute in float64 if all arrays of a parameter are
// float64, else in float32. Results are the same for any number of threads. Throws InternalError
// unless the arrays of a parameter are all float64, or each float32, bfloat16 or float16.
// The states of SGD are the momentum buffer, if there is momentum. Those of Adam are the mean, the
// mean of squares and, with amsgrad, the largest mean of squares. Those of LAMB are the mean and
// the mean of squares.
void run(const std::vector<Update<SgdRule>>& updates, Isa isa);
void run(const std::vector<Update<AdamRule>>& updates, Isa isa);
void run(const std::vector<Update<LambRule>>& updates, Isa isa);

struct Numbers {
  Array array;
  int64_t count = 0;
};

// The sum of the squares of all numbers, in float64. Takes the dtypes and throws the errors of
// run().
double sum_squares(const std::vector<Numbers>& all, Isa isa);

}  // namespace torch_ort::cpu
