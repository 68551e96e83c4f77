// The formulas of activation functions, for files: a region has words for gelu and silu (words.h),
// and formulas of its own for others (passes/composites/activations.cpp). Operands are of the
// computed dtype.
#pragma once

#include "ops/formula.h"

namespace torch_ort::ops {

// The constants of SELU, as PyTorch has them.
constexpr double kSeluAlpha = 1.6732632423543772848170429916717;
constexpr double kSeluScale = 1.0507009873554804934193349852946;

// Whether alpha * x + beta is x / 6 + 1 / 2. Attributes of files have 32 bits, so alpha is compared
// as a float.
inline bool is_pytorchs_hard_sigmoid(double alpha, double beta) {
  return static_cast<float>(alpha) == static_cast<float>(1.0 / 6.0) && beta == 0.5;
}

ir::Value* gelu(Formula& f, ir::Value* x);
ir::Value* gelu_tanh(Formula& f, ir::Value* x);
ir::Value* hard_swish(Formula& f, ir::Value* x);
ir::Value* mish(Formula& f, ir::Value* x);
ir::Value* silu(Formula& f, ir::Value* x);

}  // namespace torch_ort::ops
