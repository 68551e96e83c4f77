// torch_ort.EmbeddingGrad has three forms, and TakeGrad the first and the last one of them:
//
//   table = EmbeddingGrad (gradient, ids)
//   table = EmbeddingGrad (gradient, ids, start)
//   table, workspace = EmbeddingGrad (gradient, ids)
//
// The second form adds to a tensor as large as the table. The third is for kernels that sort the
// ids. Its workspace is memory for the kernel alone:
//
//   parts    two lines of sums for each kPartRows ids, in float64 if the gradient is, else float32
//   counts   of each value of a digit, 32 bits each, for each kSortedIds ids
//   keys and numbers of the sorted ids, twice, 32 bits each
#pragma once

#include "ir/dim.h"
#include "ir/type.h"

namespace torch_ort::ops {

struct SortedSumsWorkspace {
  static constexpr int64_t kPartRows = 128, kSortedIds = 1024, kDigits = 512;

  ir::Dim parts_bytes, counts_bytes, array_bytes;  // the last one for each of four arrays
  ir::Dim bytes() const;
};

// For so many ids, and rows of so many columns.
SortedSumsWorkspace sorted_sums_workspace(const ir::Dim& num_ids, const ir::Dim& columns,
                                          ir::DType dtype);
// The type of the workspace for so many ids that select along the dim `axis` of a table.
ir::Type sorted_sums_workspace(const ir::Dim& num_ids, const ir::Type& table, int64_t axis);

}  // namespace torch_ort::ops
