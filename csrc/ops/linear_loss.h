// What a node LinearCrossEntropy of the domain torch_ort is told to do:
//
//   loss, workspace, [logits], [hidden_grad], [weight_grad], [bias_grad], [sums], [logsumexp]
//     = LinearCrossEntropy (hidden, weight, labels, [bias], [class_weight], [loss_grad],
//                           [sums_grad], [square_grad], [list])
//
// The cross-entropy of logits = hidden * weight^T + bias (N x D, V x D, V) against one label for
// each row, its mean or sum over rows whose label is not `ignore_index`, each with the weight of
// its class; or those of all rows (N), zero where the label does not count. With a `soft_cap` the
// logits are soft_cap * tanh(product / soft_cap).
//
// Of each row there are, where they are asked for (N),
//   sums, of the logarithms of all probabilities, each times the weight of its class, and
//   logsumexp, of the logits.
// The gradients are those of
//   sum(loss_grad * loss) + sum(sums_grad * sums) + sum(square_grad * logsumexp^2) / 2,
// where loss_grad is of the shape of the loss, and 1 if it is not there; the others are N.
//
// Logits are made some rows at a time, and are gone when these rows are done. Losses and other
// numbers of rows, and all gradients, are of the type that sums have: float64 for doubles, else
// float32. `workspace` is memory of the kernel's own, which nobody reads.
//
// A list of rows (torch_ort.Rows) has all rows whose label counts. Of other rows logits alone are
// computed, where these are wanted: what hidden_grad has of them is left as it is in memory.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <string_view>
#include <vector>

namespace torch_ort::ops {

enum class Reduction : uint8_t { kNone, kMean, kSum };

struct LinearLoss {
  bool has_bias = false, has_class_weight = false, has_row_list = false;
  bool has_loss_grad = false, has_sums_grad = false, has_square_grad = false;
  // Which results there are besides the loss and the workspace.
  bool has_logits = false, has_hidden_grad = false, has_weight_grad = false, has_bias_grad = false;
  bool has_sums = false, has_logsumexp = false;
  Reduction reduction = Reduction::kMean;
  double soft_cap = 0;  // 0: none
  int64_t ignore_index = -100;
  int64_t rows = 0;  // whose logits there are at a time
  // How many groups the classes stand in. Each group has sums of its own, which are added up in one
  // order, whatever the number of threads.
  int64_t groups = 0;

  // Where results stand, if they are there.
  static constexpr size_t kLogits = 2;
  size_t hidden_grad() const { return kLogits + (has_logits ? 1 : 0); }

  bool is_mean() const { return reduction == Reduction::kMean; }
  bool has_grad() const { return has_hidden_grad || has_weight_grad || has_bias_grad; }
  // Whether something is made of rows whose label does not count.
  bool has_all_rows() const {
    return has_sums || has_logsumexp || has_sums_grad || has_square_grad;
  }
};

// UserError where an attribute says what there is not.
LinearLoss linear_loss(const ir::Node& node);
void write(const LinearLoss& loss, ir::Attrs& attrs);

// Rows and groups for so many classes and numbers of a hidden row.
void choose_chunks(LinearLoss& loss, int64_t classes, int64_t width, int64_t bytes_of_number);
// How many numbers the workspace holds.
int64_t workspace_size(const LinearLoss& loss, int64_t classes, int64_t width);

}  // namespace torch_ort::ops
