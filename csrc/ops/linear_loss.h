// The attributes of torch_ort.LinearCrossEntropy:
//
//   loss, workspace, [logits], [hidden_grad], [weight_grad], [bias_grad], [sums], [logsumexp]
//     = LinearCrossEntropy (hidden, weight, labels, [bias], [class_weight], [loss_grad],
//                           [sums_grad], [square_grad], [list])
//
// The op computes the cross-entropy of logits = hidden * weight^T + bias (N x D, V x D, V) against
// one label for each row. `loss` is the mean or the sum over the rows whose label is not
// `ignore_index`, each weighted by its class; or it has the losses of all rows (N), zero where the
// label is ignored. With a `soft_cap` the logits are soft_cap * tanh(product / soft_cap).
//
// Two results have a number for each row (N):
//   sums       the sum of the logarithms of all probabilities, each times the weight of its class
//   logsumexp  of the logits
// The gradients are those of
//   sum(loss_grad * loss) + sum(sums_grad * sums) + sum(square_grad * logsumexp^2) / 2,
// where loss_grad has the shape of the loss and is 1 if it is missing; the other two have N
// numbers.
//
// The kernel computes the logits of a chunk of rows at a time and does not keep them. Losses, other
// numbers of rows and all gradients have the dtype of the sums: float64 for doubles, else float32.
// `workspace` is memory for the kernel alone, in numbers of that dtype. There are two kinds of
// kernels: one that multiplies by itself, block by block, and one that has the device's library
// multiply whole chunks (region::KernelRow::uses_library).
//
// The list of rows (torch_ort.Rows) has all rows whose label counts. For other rows only logits are
// computed, if they are a result; the kernel leaves their rows of hidden_grad unwritten.
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
  double soft_cap = 0;  // 0: no cap
  int64_t ignore_index = -100;
  int64_t rows = 0;  // of a chunk, whose logits are in memory at one time
  // The classes are summed in this many groups. Each group has its own sums, which are added up in
  // a fixed order, so that results do not depend on the number of threads. 1 with a library.
  int64_t groups = 0;

  // The positions of results among the outputs, if they exist.
  static constexpr size_t kLogits = 2;
  size_t hidden_grad() const { return kLogits + (has_logits ? 1 : 0); }

  bool is_mean() const { return reduction == Reduction::kMean; }
  bool has_grad() const { return has_hidden_grad || has_weight_grad || has_bias_grad; }
  // Whether anything is computed from rows whose label is ignored.
  bool has_all_rows() const {
    return has_sums || has_logsumexp || has_sums_grad || has_square_grad;
  }
};

// Reads the attributes. Throws UserError on values that the op does not allow.
LinearLoss linear_loss(const ir::Node& node);
void write(const LinearLoss& loss, ir::Attrs& attrs);

// Chooses `rows` and `groups` for the number of classes, the width of a hidden row, and the bytes
// of one number.
void choose_chunks(LinearLoss& loss, int64_t classes, int64_t width, int64_t bytes_of_number);
// The size of the workspace, in numbers.
int64_t workspace_size(const LinearLoss& loss, int64_t classes, int64_t width);

// The same with a library. `rows` is the number of rows that are expected, and the logits of a
// chunk have the dtype of `hidden`.
void choose_library_chunks(LinearLoss& loss, int64_t rows, int64_t classes, ir::DType hidden);
// What is in the workspace then, as offsets in numbers.
struct LibraryWorkspace {
  int64_t row_stride = 0;  // of logits, in elements of their dtype: rows begin at 16 bytes
  int64_t losses = 0;      // by row of the chunk; before them are the logits
  int64_t totals = 0;      // see kTotals
  int64_t size = 0;        // of all

  // The sum of the weights of labels, that of the weights of classes, and that of the losses.
  static constexpr int64_t kTotals = 3;
};
LibraryWorkspace library_workspace(const LinearLoss& loss, int64_t classes, ir::DType hidden);

}  // namespace torch_ort::ops
