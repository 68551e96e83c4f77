#include "ops/linear_loss.h"

#include "base/error.h"

#include <algorithm>
#include <string>

namespace torch_ort::ops {

namespace {

// For each chunk the weight and a gradient of its size are read anew, so few rows would leave the
// products waiting for memory. Multiples of what register kernels take at once.
constexpr int64_t kLogitBytes = 64 << 20;
constexpr int64_t kRowUnit = 48, kMostRows = 528;
constexpr int64_t kSumBytes = 8 << 20;
constexpr int64_t kMostGroups = 64, kLeastGroups = 4;

struct Result {
  const char* name;
  bool LinearLoss::* is_made;
};

constexpr Result kResults[] = {{"logits", &LinearLoss::has_logits},
                               {"hidden_grad", &LinearLoss::has_hidden_grad},
                               {"weight_grad", &LinearLoss::has_weight_grad},
                               {"bias_grad", &LinearLoss::has_bias_grad}};

}  // namespace

LinearLoss linear_loss(const ir::Node& node) {
  LinearLoss loss;
  loss.has_bias = ir::int_attr(node.attrs, "has_bias", 0) != 0;
  loss.has_class_weight = ir::int_attr(node.attrs, "has_class_weight", 0) != 0;
  loss.has_row_list = ir::int_attr(node.attrs, "has_row_list", 0) != 0;
  for (const Result& result : kResults) {
    loss.*result.is_made = ir::int_attr(node.attrs, concat("makes_", result.name).c_str(), 0) != 0;
  }
  const std::string reduction = ir::string_attr(node.attrs, "reduction", "mean");
  if (reduction != "mean" && reduction != "sum") {
    throw UserError(
        concat("LinearCrossEntropy: reduction: got '", reduction, "', want mean or sum"));
  }
  loss.is_mean = reduction == "mean";
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
  if (loss.has_bias) attrs["has_bias"] = ir::Dim(1);
  if (loss.has_class_weight) attrs["has_class_weight"] = ir::Dim(1);
  if (loss.has_row_list) attrs["has_row_list"] = ir::Dim(1);
  for (const Result& result : kResults) {
    if (loss.*result.is_made) attrs[concat("makes_", result.name)] = ir::Dim(1);
  }
  attrs["reduction"] = std::string(loss.is_mean ? "mean" : "sum");
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
  int64_t of_row = 2 * loss.groups + 3;  // the largest logit and the sum, by group; that of all
  if (loss.has_grad()) of_row += classes;
  if (loss.has_hidden_grad) of_row += loss.groups * width;
  if (loss.has_row_list) of_row += width;
  return loss.rows * of_row;
}

}  // namespace torch_ort::ops
