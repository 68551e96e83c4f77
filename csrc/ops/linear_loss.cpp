#include "ops/linear_loss.h"

#include "base/error.h"
#include "base/rounding.h"
#include "ops/formula.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace torch_ort::ops {

namespace {

// Each chunk reads the weight and a gradient of its size again, so with few rows the products would
// wait for memory. The numbers of rows are multiples of what register kernels compute at a time.
constexpr int64_t kLogitBytes = 128 << 20;
constexpr int64_t kRowUnit = 48, kMostRows = 528;
constexpr int64_t kSumBytes = 8 << 20;
constexpr int64_t kMostGroups = 64, kLeastGroups = 4;

// With a library. The gradient of the weight, and the weight twice, are read again for each chunk,
// and the products want thousands of rows to keep a GPU busy.
constexpr int64_t kLibraryLogitBytes = 256 << 20;
constexpr int64_t kLibraryRowUnit = 128, kLeastLibraryRows = 1024;
constexpr int64_t kRowBytes = 16;  // what rows of logits are multiples of

struct Part {
  const char* attr;
  bool LinearLoss::* is_there;
};

constexpr Part kParts[] = {{"has_bias", &LinearLoss::has_bias},
                           {"has_class_weight", &LinearLoss::has_class_weight},
                           {"has_loss_grad", &LinearLoss::has_loss_grad},
                           {"has_sums_grad", &LinearLoss::has_sums_grad},
                           {"has_square_grad", &LinearLoss::has_square_grad},
                           {"has_row_list", &LinearLoss::has_row_list},
                           {"makes_logits", &LinearLoss::has_logits},
                           {"makes_hidden_grad", &LinearLoss::has_hidden_grad},
                           {"makes_weight_grad", &LinearLoss::has_weight_grad},
                           {"makes_bias_grad", &LinearLoss::has_bias_grad},
                           {"makes_sums", &LinearLoss::has_sums},
                           {"makes_logsumexp", &LinearLoss::has_logsumexp}};

constexpr const char* kReductions[] = {"none", "mean", "sum"};

}  // namespace

LinearLoss linear_loss(const ir::Node& node) {
  LinearLoss loss;
  for (const Part& part : kParts) {
    loss.*part.is_there = ir::int_attr(node.attrs, part.attr, 0) != 0;
  }
  const std::string reduction = ir::string_attr(node.attrs, "reduction", "mean");
  const auto found = std::find(std::begin(kReductions), std::end(kReductions), reduction);
  if (found == std::end(kReductions)) {
    throw UserError(
        concat("LinearCrossEntropy: reduction: got '", reduction, "', want none, mean or sum"));
  }
  loss.reduction = static_cast<Reduction>(found - std::begin(kReductions));
  loss.soft_cap = ir::float_attr(node.attrs, "soft_cap", 0);
  loss.ignore_index = ir::int_attr(node.attrs, "ignore_index", -100);
  loss.rows = ir::int_attr(node.attrs, "rows", 0);
  loss.groups = ir::int_attr(node.attrs, "groups", 0);
  if (loss.rows < 1 || loss.groups < 1) {
    throw UserError(concat("LinearCrossEntropy: got ", loss.rows, " rows at a time and ",
                           loss.groups, " groups, want 1 or more"));
  }
  return loss;
}

void write(const LinearLoss& loss, ir::Attrs& attrs) {
  for (const Part& part : kParts) {
    if (loss.*part.is_there) attrs[part.attr] = ir::Dim(1);
  }
  attrs["reduction"] = std::string(kReductions[static_cast<size_t>(loss.reduction)]);
  if (loss.soft_cap != 0) attrs["soft_cap"] = loss.soft_cap;
  attrs["ignore_index"] = ir::Dim(loss.ignore_index);
  attrs["rows"] = ir::Dim(loss.rows);
  attrs["groups"] = ir::Dim(loss.groups);
}

void choose_chunks(LinearLoss& loss, int64_t classes, int64_t width, int64_t bytes_of_number) {
  const int64_t row_bytes = std::max<int64_t>(classes, 1) * bytes_of_number;
  const int64_t units = kLogitBytes / row_bytes / kRowUnit;
  loss.rows = std::clamp(units * kRowUnit, kRowUnit, kMostRows);
  const int64_t sum_bytes = loss.rows * std::max<int64_t>(width, 1) * bytes_of_number;
  loss.groups = std::clamp(kSumBytes / sum_bytes, kLeastGroups, kMostGroups);
}

int64_t workspace_size(const LinearLoss& loss, int64_t classes, int64_t width) {
  int64_t of_row = 2 * loss.groups + 3;  // maxima and sums of groups, and three numbers
  if (loss.has_grad()) of_row += classes;
  if (loss.has_hidden_grad) of_row += loss.groups * width;
  if (loss.has_row_list) of_row += width;
  if (loss.has_sums) of_row += 2 * loss.groups;  // by group, in float64
  if (loss.has_sums_grad) of_row += 1;
  return loss.rows * of_row;
}

void choose_library_chunks(LinearLoss& loss, int64_t rows, int64_t classes, ir::DType hidden) {
  const int64_t row_bytes = std::max<int64_t>(classes, 1) * ir::size_bytes(hidden);
  const int64_t most = std::max(kLibraryLogitBytes / row_bytes, kLeastLibraryRows);
  const int64_t chunks = std::max<int64_t>(ceil_div(rows, most), 1);
  loss.rows = round_up(std::max<int64_t>(ceil_div(rows, chunks), 1), kLibraryRowUnit);
  loss.groups = 1;
}

LibraryWorkspace library_workspace(const LinearLoss& loss, int64_t classes, ir::DType hidden) {
  const int64_t bytes = ir::size_bytes(hidden);
  const int64_t of_number = ir::size_bytes(computed_dtype(hidden));
  LibraryWorkspace space;
  space.row_stride = round_up(classes, kRowBytes / bytes);
  space.losses = loss.rows * space.row_stride * bytes / of_number;
  space.totals = space.losses + loss.rows;
  space.size = space.totals + LibraryWorkspace::kTotals;
  return space;
}

}  // namespace torch_ort::ops
