// One step of an optimizer over all parameters at once.
//
// A step is one kernel rather than a tile program. There are few rules, and for their dozen
// operations on seven arrays an interpreter would take three times as long as memory does
// (benchmarks/results/decisions.md). The threads divide the elements of all parameters.
#pragma once

#include "cpu/kernels.h"
#include "optim/operands.h"

#include <cstdint>
#include <vector>

namespace torch_ort::optim {

// The functions below update dense tensors on the CPU whose parameter, gradient and states have one
// layout and are all float64, or each float32, bfloat16 or float16. They return the indices of the
// other parameters, which they leave unchanged. They throw UserError if the lists differ in length.

// With momentum, there is a buffer for each parameter, and a flag whether this is its first step.
std::vector<int64_t> sgd_step(const Tensors& parameters, const Tensors& gradients,
                              const Tensors& buffers, const std::vector<uint8_t>& is_first,
                              cpu::SgdRule rule, cpu::Isa isa);

struct AdamTensors {
  Tensors parameters, gradients, means, squares;
  Tensors largest;  // the largest means of squares; only with amsgrad
  Tensors steps;    // one number each: the steps taken, to which 1 is added
};

// The options of torch.optim.Adam by their names; with decoupled weight decay it is AdamW.
struct AdamOptions {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false, maximize = false, decoupled_weight_decay = false;
};

std::vector<int64_t> adam_step(const AdamTensors& tensors, const AdamOptions& options,
                               cpu::Isa isa);

// Operands of steps whose rules the caller has computed. Parameter i follows rules[rule_of[i]];
// step counts are not updated.
struct RuledTensors {
  Tensors parameters, gradients, means, squares;
  std::vector<int64_t> rule_of;
};

std::vector<int64_t> adam_update(const RuledTensors& tensors,
                                 const std::vector<cpu::AdamRule>& rules, cpu::Isa isa);
std::vector<int64_t> lamb_update(const RuledTensors& tensors,
                                 const std::vector<cpu::LambRule>& rules, cpu::Isa isa);

struct SumOfSquares {
  // Infinite or NaN if an element is; for float64 also if the sum overflows.
  double sum = 0;
  std::vector<int64_t> left;  // indices of the tensors that were left out
};

SumOfSquares sum_squares(const Tensors& tensors, cpu::Isa isa);

}  // namespace torch_ort::optim
