// One step of an optimizer over all parameters at once.
#pragma once

#include "cpu/kernels.h"
#include "optim/operands.h"

#include <cstdint>
#include <vector>

namespace torch_ort::optim {

// Steps take dense tensors on the CPU that have one layout, all of float64 or each of float32,
// bfloat16 or float16. They give the indices of the other parameters, which stay as they are.
// UserError if lists have other lengths than they should.

// Where there is momentum, a buffer and a flag for each parameter: whether this is its first step.
std::vector<int64_t> sgd_step(const Tensors& parameters, const Tensors& gradients,
                              const Tensors& buffers, const std::vector<uint8_t>& is_first,
                              cpu::SgdRule rule, cpu::Isa isa);

struct AdamTensors {
  Tensors parameters, gradients, means, squares;
  Tensors largest;  // of the means of squares: with amsgrad only
  Tensors steps;    // one number each: how many steps were taken, to which this one is added
};

// As torch.optim.Adam names them; decoupled weight decay makes it AdamW.
struct AdamOptions {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool amsgrad = false, maximize = false, decoupled_weight_decay = false;
};

std::vector<int64_t> adam_step(const AdamTensors& tensors, const AdamOptions& options,
                               cpu::Isa isa);

// Steps whose rules the caller has worked out: parameter i follows rules[rule_of[i]], and nothing
// is counted.
struct RuledTensors {
  Tensors parameters, gradients, means, squares;
  std::vector<int64_t> rule_of;
};

std::vector<int64_t> adam_update(const RuledTensors& tensors,
                                 const std::vector<cpu::AdamRule>& rules, cpu::Isa isa);
std::vector<int64_t> lamb_update(const RuledTensors& tensors,
                                 const std::vector<cpu::LambRule>& rules, cpu::Isa isa);

struct SumOfSquares {
  double sum = 0;             // not finite if a number is not; of float64 also where it overflows
  std::vector<int64_t> left;  // indices of the tensors that it leaves out
};

SumOfSquares sum_squares(const Tensors& tensors, cpu::Isa isa);

}  // namespace torch_ort::optim
