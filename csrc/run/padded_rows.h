// Lets the rows of matrices on GPUs begin at multiples of 16 bytes; internal to run/.
//
// The libraries' fast kernels for products read 16 bytes of a row at once. Where rows have an odd
// number of columns, as the logits of GPT-2 have 50,257, most rows begin elsewhere, and slower
// kernels run.
#pragma once

#include "run/describe.h"
#include "run/root_uses.h"

namespace torch_ort::run {

inline constexpr int64_t kRowAlignment = 16;  // bytes
// How many elements of a tensor these are.
int64_t elements_at_once(const TensorSpec& spec);

// Leaves gaps after the rows of wide planned tensors that products of matrices read or write.
// Declines if any step that uses such a tensor wants dense memory.
class RowPadder {
 public:
  // `uses` are those of the description.
  RowPadder(const CompiledGraph& graph, Description& description, const RootUses& uses);
  void run();

 private:
  bool may_have_gaps(int root) const;
  void pad(int root);
  bool is_product(size_t step) const;
  bool wants_dense_result(size_t step) const;

  const CompiledGraph& graph_;
  Description& result_;
  const RootUses& uses_;
};

}  // namespace torch_ort::run
