// Lets the rows of matrices on GPUs begin at multiples of 16 bytes; internal to run/.
//
// The libraries' fast kernels for products read 16 bytes of a row at once. Where rows have an odd
// number of columns, as the logits of GPT-2 have 50,257, most rows begin elsewhere, and slower
// kernels run.
//
// So the plan leaves gaps of a few bytes after such rows. Products take the distance of rows as an
// argument, and so do regions. This is decided with the sizes, when a plan is made: the graph knows
// nothing of it. Tensors that the caller gets, or that an operator of PyTorch or of the user reads,
// stay dense. So do results to which a bias is added, since PyTorch has cuBLASLt add it to dense
// results only, and narrow rows.
#pragma once

#include "run/describe.h"
#include "run/memory/root_uses.h"

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
