// The source texts of sorted_sums.cpp's kernels: prelude.cuh and sorted_sums.cuh, instantiated for
// dtypes.
#pragma once

#include "ir/type.h"

#include <string>

namespace torch_ort::cuda {

struct SumsText {
  std::string name;
  std::string text;
};

const char* sorted_sums_prelude();  // sorted_sums.cuh

// The kernels that sort ids: sorted_sums_sort, and for many ids sorted_sums_count_ids,
// sorted_sums_place_ids, sorted_sums_count_keys and sorted_sums_place_keys.
SumsText sort_text(ir::DType ids);

// How the gradient is read.
struct GradientForm {
  ir::DType dtype = ir::DType::kFloat;
  int64_t vector = 1;  // columns that are read at once
  // Whether all rows have the same distance, and whether all columns do, also in the table.
  bool rows_are_run = false, columns_are_run = false;
  bool wide_index = false;  // columns need more than 32 bits
};
// The kernels sorted_sums_parts and sorted_sums_table.
SumsText sums_text(const GradientForm& form);

}  // namespace torch_ort::cuda
