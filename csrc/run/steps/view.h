// Metadata only: the results share the memory of the first tensor argument.
#pragma once

#include "run/steps/operator.h"

#include <vector>

namespace torch_ort::run {

// Views of engine memory and constants are made once with a context, right for any address. Those
// of the caller's memory are described once and pointed at the memory of each call. What is left is
// made in the run.
struct BoundView : BoundStep {
  const OperatorStep& of;
  int base;  // slot
  std::vector<BoundArg> args;
  std::vector<ViewSpec> views;  // of the caller's memory, or of adopted memory

  BoundView(const OperatorStep& of, int base, Binder& binder);

  const char* form() const override { return "view"; }
  bool is_view() const override { return true; }
  std::vector<const ViewSpec*> moving_views() const override;
  void run(Context& context, StepCounts& counts) const override;
  // Raises UserError where the results are laid out otherwise than the plan took them to be.
  void make_static(Context& context) const;

 private:
  bool has_known_args() const;
  void describe_views(const Binder& binder);
  bool move_views(Context& context) const;
};

}  // namespace torch_ort::run
