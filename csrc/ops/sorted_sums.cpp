#include "ops/sorted_sums.h"

#include "ops/shapes.h"

namespace torch_ort::ops {

using ir::Dim;

Dim SortedSumsWorkspace::bytes() const {
  return plus(plus(parts_bytes, counts_bytes), times(4, array_bytes));
}

SortedSumsWorkspace sorted_sums_workspace(const Dim& num_ids, const Dim& columns, ir::DType dtype) {
  using Workspace = SortedSumsWorkspace;
  const int64_t bytes_of_sum = dtype == ir::DType::kDouble ? 8 : 4;
  const Dim lines = times(2, floor_div(num_ids, Workspace::kPartRows));
  // Fewer ids than kSortedIds may be left.
  const Dim blocks = plus(floor_div(num_ids, Workspace::kSortedIds), 1);
  return {.parts_bytes = times(bytes_of_sum, times(lines, columns)),
          .counts_bytes = times(4 * Workspace::kDigits, blocks),
          .array_bytes = times(4, num_ids)};
}

ir::Type sorted_sums_workspace(const Dim& num_ids, const ir::Type& table, int64_t axis) {
  ir::Shape others = *table.shape;
  others.erase(others.begin() + axis);
  const Dim bytes = sorted_sums_workspace(num_ids, ir::numel(others), table.dtype).bytes();
  ir::Type type = with_shape(table, ir::Shape{bytes});
  type.dtype = ir::DType::kUInt8;
  return type;
}

}  // namespace torch_ort::ops
