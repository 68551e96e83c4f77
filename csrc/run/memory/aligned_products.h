// Gives products of matrices on GPUs even numbers of columns; internal to run/.
//
// The libraries' fast kernels read and write 16 bytes of a row at once, and so want rows that begin
// at multiples of 16 bytes (padded_rows.h) and numbers of columns that are multiples as well: for
// the 50,257 columns of GPT-2's logits an H100 takes 6.6 ms where 50,264 take 0.9. So such a
// product is computed with a few columns more, which are zeros or are never read. The gradient of
// such a weight gets more rows or columns in the same way.
//
// The additional columns go into the gaps after the rows of the result, and the zeros behind the
// rows of the weight, for which the plan has room behind what was cast of it. A parameter that is
// not cast is copied, and a result that the caller gets, whose rows have no gaps, is copied from a
// block of rows at a time. The gradient of such a weight has rows behind it that nobody reads, or
// is copied out of wider rows.
#pragma once

#include "run/describe.h"
#include "run/memory/root_uses.h"
#include "run/steps/product.h"

#include <cstdint>
#include <optional>

namespace torch_ort::run {

// result[rows, columns] <- a[rows, depth] * b[depth, columns]
class ProductAligner {
 public:
  // After all others that change the layout of tensors. `uses` may be older: it is asked only about
  // roots that have kept their memory.
  ProductAligner(const CompiledGraph& graph, Description& description, const RootUses& uses);
  void run();

  // Whether more columns of the result pay, wherever its factors stand.
  static bool pays_for_result(const ProductSlots& slots, const Description& description);

 private:
  struct Sizes;

  std::optional<AlignedProduct> aligned(const ProductSlots& slots);
  std::optional<AlignedProduct> aligned_wide(const ProductSlots& slots);
  // A factor that has room for more rows or columns in its own memory.
  std::optional<Widened> in_own_memory(int slot, const std::vector<int64_t>& sizes);
  // The other factor, which is copied if it has no room.
  Widened widened_b(int slot, const Sizes& sizes);
  std::optional<Widened> widened_result(int slot, const Sizes& sizes);
  // Whether nobody but the steps uses the memory of the slot, and it begins with the slot's first
  // element.
  bool is_at_start_of_planned(int slot) const;
  // Makes room for a matrix with this layout in the memory of the slot.
  void make_room(int slot, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

  const CompiledGraph& graph_;
  Description& result_;
  const RootUses& uses_;
};

}  // namespace torch_ort::run
