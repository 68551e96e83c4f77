// The formulas of softmax, of its logarithm, and of their gradients. They take values of any float
// dtype, and give values of the computed one.
#pragma once

#include "ops/formula.h"

namespace torch_ort::ops {

// Along `axes`. The largest number is taken from all of them first, so that no power overflows; NaN
// where all are -inf, or one is inf, as PyTorch's kernel gives.
ir::Value* softmax(Formula& f, ir::Value* x, const ir::Shape& axes);
ir::Value* log_softmax(Formula& f, ir::Value* x, const ir::Shape& axes);

// The gradient of the input, from that of `result`.
ir::Value* softmax_gradient(Formula& f, ir::Value* gradient, ir::Value* result,
                            const ir::Shape& axes);
// `sum`: of the gradient, along the axes of log_softmax().
ir::Value* log_softmax_gradient(Formula& f, ir::Value* gradient, ir::Value* result, ir::Value* sum);

}  // namespace torch_ort::ops
