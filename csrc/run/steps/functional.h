// The kernel allocates the results, and the engine adopts them.
#pragma once

#include "run/steps/operator.h"

#include <memory>

namespace torch_ort::run {

struct FunctionalStep : OperatorStep {
  // Set for an operator that is composed of others: its result may be an argument, or a view of
  // one, although its schema does not say so. A wait for what no collective of the graph has
  // started gives its argument.
  bool may_give_argument;

  FunctionalStep(const CallSite& site, const c10::OperatorHandle& op);

  const char* form() const override { return "functional"; }
  // A kernel of a third party may keep a reference to its result, so the result must not be
  // overwritten.
  bool gives_up_results() const override;
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

}  // namespace torch_ort::run
