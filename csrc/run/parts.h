// Concatenations whose parts are made where they lie in the whole; internal to run/.
#pragma once

#include "run/describe.h"
#include "run/steps/concat.h"

namespace torch_ort::run {

// Makes results of regions parts of the concatenation that reads them, itself or through views, so
// that this has no more to copy than what it gets from elsewhere. Declines where somebody who wants
// dense memory reads a part, or where a part would keep the whole alive for longer.
class PartPlacer {
 public:
  // After roots are decided.
  PartPlacer(const CompiledGraph& graph, Description& description);
  void run();

 private:
  void place_parts_of(const ConcatStep& concat, size_t step);
  bool can_hold_parts(int whole) const;
  std::vector<ViewSpec> pieces_of(const ConcatStep& concat) const;
  bool place(const ViewSpec& piece, int whole, size_t concat);
  bool can_be_made_elsewhere(int root, int whole, size_t concat) const;
  bool is_in_forward(size_t step) const;
  bool crosses(int root) const;
  bool leaves(int root) const;

  const CompiledGraph& graph_;
  Description& result_;
  std::vector<std::vector<size_t>> readers_;  // by root: steps
  std::vector<std::vector<int>> sharers_;     // by root: slots, itself among them
};

}  // namespace torch_ort::run
