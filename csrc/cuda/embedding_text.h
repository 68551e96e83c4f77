// The source texts of embedding.cpp's kernels: prelude.cuh and embedding.cuh, instantiated for
// dtypes.
#pragma once

#include "ir/type.h"

#include <string>

namespace torch_ort::cuda {

struct EmbeddingText {
  std::string name;
  std::string text;
};

const char* embedding_prelude();  // embedding.cuh

// The kernels that sort ids: embedding_sort, and for many ids embedding_count_ids,
// embedding_place_ids, embedding_count_keys and embedding_place_keys.
EmbeddingText sort_text(ir::DType ids);

// How the gradient is read.
struct GradientForm {
  ir::DType dtype = ir::DType::kFloat;
  int64_t vector = 1;       // columns that are read at once
  bool is_run = false;      // all rows have the same distance
  bool wide_index = false;  // columns need more than 32 bits
};
// The kernels embedding_parts and embedding_table.
EmbeddingText sums_text(const GradientForm& form);

}  // namespace torch_ort::cuda
