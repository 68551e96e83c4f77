// Writes operands of concatenations in place; internal to run/.
//
// To the plan such an operand is a view of the concatenation. So rotary embeddings and gated
// activations copy nothing but inputs and the like, and the gradients of a packed projection of
// queries, keys and values cost no copy, whatever the sizes.
#pragma once

#include "run/describe.h"
#include "run/memory/root_uses.h"
#include "run/steps/concat.h"

namespace torch_ort::run {

// The operands of a concatenation that have elements, with their places in the whole. Nothing if
// sizes are not known, or do not add up to those of the whole, as may happen with the types of a
// file. `specs` are those of all slots.
std::vector<ViewSpec> pieces_of(const ConcatStep& concat, const std::vector<TensorSpec>& specs);

// Makes results of steps parts of the concatenation that reads them, directly or through views, so
// that only other operands are copied. Declines if a reader of a part wants dense memory, or if a
// part would keep the whole alive for longer.
class PartPlacer {
 public:
  // `uses` are those of the description.
  PartPlacer(const CompiledGraph& graph, Description& description, const RootUses& uses);
  void run();

 private:
  void place_parts_of(const ConcatStep& concat, size_t step);
  bool can_hold_parts(int whole) const;
  bool place(const ViewSpec& piece, int whole, size_t concat);
  bool can_be_made_elsewhere(int root, int whole, size_t concat) const;
  bool needs_runs(int root) const;  // its maker or a reader does
  bool is_in_forward(size_t step) const;
  bool crosses(int root) const;

  const CompiledGraph& graph_;
  Description& result_;
  const RootUses& uses_;
};

}  // namespace torch_ort::run
