// The formulas of activation functions, for files: a region has words for gelu and silu (words.h).
// Operands are of the computed dtype.
#pragma once

#include "ops/formula.h"

namespace torch_ort::ops {

ir::Value* gelu(Formula& f, ir::Value* x);
ir::Value* gelu_tanh(Formula& f, ir::Value* x);
ir::Value* hard_swish(Formula& f, ir::Value* x);
ir::Value* mish(Formula& f, ir::Value* x);
ir::Value* silu(Formula& f, ir::Value* x);

}  // namespace torch_ort::ops
