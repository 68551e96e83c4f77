#include "ops/embedding_grad.h"

#include "ops/shapes.h"

namespace torch_ort::ops {

using ir::Dim;

Dim EmbeddingWorkspace::bytes() const {
  return plus(plus(parts_bytes, counts_bytes), times(4, array_bytes));
}

EmbeddingWorkspace embedding_workspace(const Dim& num_ids, const Dim& columns, ir::DType dtype) {
  using Workspace = EmbeddingWorkspace;
  // How many parts the ids have, the last of which is not full.
  const auto parts = [&](int64_t of_part) { return plus(floor_div(num_ids, of_part), 1); };
  const int64_t bytes_of_sum = dtype == ir::DType::kDouble ? 8 : 4;
  const Dim lines = times(2, parts(Workspace::kPartRows));
  return {.parts_bytes = times(bytes_of_sum, times(lines, columns)),
          .counts_bytes = times(4 * Workspace::kDigits, parts(Workspace::kSortedIds)),
          .array_bytes = times(4, num_ids)};
}

}  // namespace torch_ort::ops
