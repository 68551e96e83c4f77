// The source text of linear_loss.cpp's kernels: prelude.cuh and linear_loss.cuh, instantiated for
// dtypes and for the operands of a node.
#pragma once

#include "ir/type.h"
#include "ops/linear_loss.h"

#include <string>

namespace torch_ort::cuda {

struct LossText {
  std::string name;
  std::string text;
};

const char* linear_loss_prelude();  // linear_loss.cuh

// The kernels linear_loss_weights, linear_loss_rows, linear_loss_sum and linear_loss_bias.
// `class_weight` is kUndefined if there is none.
LossText loss_text(const ops::LinearLoss& form, ir::DType logits, ir::DType class_weight);

}  // namespace torch_ort::cuda
