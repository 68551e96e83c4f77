// The formulas of layer norm and RMS norm, and of their gradients. They take values of any float
// dtype, and give values of the computed one.
#pragma once

#include "ops/formula.h"

namespace torch_ort::ops {

struct LayerNorm {
  ir::Value *result, *mean, *deviation;  // deviation: sqrt(variance + epsilon)
};
// Along `axes`. Without a weight, or a bias, where these are nullptr.
LayerNorm layer_norm(Formula& f, ir::Value* x, const ir::Shape& axes, double epsilon,
                     ir::Value* weight, ir::Value* bias);

// (x - mean) * rstd: the result before weight and bias; rstd is 1 / deviation.
ir::Value* normalized(Formula& f, ir::Value* x, ir::Value* mean, ir::Value* rstd);
// The gradient of the input, from that of the result. `normal`: what normalized() gave.
ir::Value* layer_norm_gradient(Formula& f, ir::Value* gradient, ir::Value* weight,
                               ir::Value* normal, ir::Value* rstd, const ir::Shape& axes);
// The gradient of the weight. `rows`: the axes that are not normalized.
ir::Value* layer_norm_weight_gradient(Formula& f, ir::Value* gradient, ir::Value* normal,
                                      const ir::Shape& rows);

struct RmsNorm {
  ir::Value *result, *rstd;  // rstd: 1 / sqrt(mean of squares + epsilon)
};
// Along `axes`. Without a weight where this is nullptr.
RmsNorm rms_norm(Formula& f, ir::Value* x, const ir::Shape& axes, double epsilon,
                 ir::Value* weight);
// The gradient of the input, from that of the result. `normal`: x * rstd. The gradient of the
// weight is that of layer norm.
ir::Value* rms_norm_gradient(Formula& f, ir::Value* gradient, ir::Value* weight, ir::Value* normal,
                             ir::Value* rstd, const ir::Shape& axes);

}  // namespace torch_ort::ops
