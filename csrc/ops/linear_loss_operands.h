// The operands of torch_ort.LinearCrossEntropy by name, for its kernels.
#pragma once

#include "ops/linear_loss.h"

namespace torch_ort::ops {

// What there is for each input or output, such as its layout or address. Those that the node does
// not have keep the default.
template <typename Each>
struct LinearLossInputs {
  Each hidden{}, weight{}, labels{}, bias{}, class_weight{}, loss_grad{}, sums_grad{},
      square_grad{}, list{};
};
template <typename Each>
struct LinearLossResults {
  Each loss{}, workspace{}, logits{}, hidden_grad{}, weight_grad{}, bias_grad{}, sums{},
      logsumexp{};
};

// `at` gives input or output i of those that the node has.
template <typename Each, typename At>
LinearLossInputs<Each> linear_loss_inputs(const LinearLoss& form, At at) {
  int next = 3;
  LinearLossInputs<Each> found{at(0), at(1), at(2)};
  if (form.has_bias) found.bias = at(next++);
  if (form.has_class_weight) found.class_weight = at(next++);
  if (form.has_loss_grad) found.loss_grad = at(next++);
  if (form.has_sums_grad) found.sums_grad = at(next++);
  if (form.has_square_grad) found.square_grad = at(next++);
  if (form.has_row_list) found.list = at(next++);
  return found;
}

template <typename Each, typename At>
LinearLossResults<Each> linear_loss_results(const LinearLoss& form, At at) {
  int next = 2;
  LinearLossResults<Each> found{at(0), at(1)};
  if (form.has_logits) found.logits = at(next++);
  if (form.has_hidden_grad) found.hidden_grad = at(next++);
  if (form.has_weight_grad) found.weight_grad = at(next++);
  if (form.has_bias_grad) found.bias_grad = at(next++);
  if (form.has_sums) found.sums = at(next++);
  if (form.has_logsumexp) found.logsumexp = at(next++);
  return found;
}

}  // namespace torch_ort::ops
