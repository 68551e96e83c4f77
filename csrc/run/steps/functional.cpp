#include "run/steps/functional.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/collective.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/memory/owned.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_ort::run {

namespace {

struct BoundFunctional : BoundCall<FunctionalStep> {
  using BoundCall::BoundCall;

  void run(Context& context, StepCounts& counts) const override {
    of.call(context, args);
    if (of.may_give_argument) own_results(context);
    of.store_results(context);
    ++counts.functional;
  }

 private:
  // Copies results that share memory although the plan takes them for memory of their own.
  // Otherwise the next step might overwrite that memory.
  void own_results(Context& context) const {
    std::vector<at::Tensor> given;
    for (int slot : of.reads()) given.push_back(context.slots[slot]);
    for (c10::IValue& result : context.stack) {
      if (result.isTensor()) {
        result = owned(result.toTensor(), given);
      } else if (result.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& element : result.toTensorVector()) {
          list.push_back(owned(element, given));
        }
        result = list;
      }
    }
  }
};

}  // namespace

// An operator that is composed of others may return an argument although its schema does not say
// so, as dropout does in eval mode. Captures take such operators apart, also in inference mode,
// where PyTorch does not; files may contain them, and then results are copied.
FunctionalStep::FunctionalStep(const CallSite& site, const c10::OperatorHandle& called)
    : OperatorStep(site, called, site.call.args),
      may_give_argument(
          called.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
          site.call.op == ops::kWaitTensor) {}

bool FunctionalStep::gives_up_results() const { return ops::is_pytorchs(op.operator_name().name); }

std::unique_ptr<BoundStep> FunctionalStep::bind(Binder& binder) const {
  return std::make_unique<BoundFunctional>(*this, binder);
}

std::unique_ptr<Step> make_functional(const CallSite& site) {
  if (!site.op) {
    throw Unsupported(concat("operator ", site.call.op, site.call.overload.empty() ? "" : ".",
                             site.call.overload, ": no such operator is registered"));
  }
  return std::make_unique<FunctionalStep>(site, *site.op);
}

}  // namespace torch_ort::run
