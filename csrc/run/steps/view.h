// A view: its results share the memory of the first tensor argument.
#pragma once

#include "run/steps/operator.h"

#include <vector>

namespace torch_ort::run {

// Views of engine memory and of constants are made once with each context, whatever its address.
// Views of the caller's memory are described once and redirected to the memory of each call. All
// others are made in the run.
struct BoundView : BoundStep {
  const OperatorStep& of;
  int base;  // slot
  std::vector<BoundArg> args;
  // Views of the caller's memory or of adopted memory.
  std::vector<ViewSpec> views;

  BoundView(const OperatorStep& of, int base, Binder& binder);

  const char* form() const override { return "view"; }
  bool is_view() const override { return true; }
  std::vector<const ViewSpec*> moving_views() const override;
  void run(Context& context, StepCounts& counts) const override;
  // Throws UserError if the results have another layout than the plan assumed.
  void make_static(Context& context) const override;

 private:
  bool has_known_args() const;
  void describe_views(const Binder& binder);
  bool move_views(Context& context) const;
};

}  // namespace torch_ort::run
