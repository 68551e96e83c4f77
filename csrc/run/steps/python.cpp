// Steps that enter the interpreter: Python callables, and calls of torch.autograd.Function.
#include "base/error.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/operator.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_ort::run {

namespace {

// A Python callable, for operators without a schema.
struct PythonStep : OperatorStep {
  using OperatorStep::OperatorStep;

  const char* form() const override { return "python"; }
  std::string why_host_is_needed() const override { return "it calls Python"; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundPython : BoundCall<PythonStep> {
  using BoundCall::BoundCall;

  // The callable runs in the dispatch state in which eager PyTorch would call it, except that no
  // gradients are recorded.
  void run(Context& context, StepCounts& counts) const override {
    const c10::impl::ForceDispatchKeyGuard plain(
        c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
    of.call(context, args);
    of.store_results(context);
    ++counts.python;
  }
};

std::unique_ptr<BoundStep> PythonStep::bind(Binder& binder) const {
  return std::make_unique<BoundPython>(*this, binder);
}

// A call of a torch.autograd.Function, forward or backward (python_op.h).
struct PythonOpStep : OperatorStep {
  using OperatorStep::OperatorStep;

  const char* form() const override { return "python_op"; }
  std::string why_host_is_needed() const override { return "it calls Python"; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundPythonOp : BoundCall<PythonOpStep> {
  using BoundCall::BoundCall;

  void run(Context& context, StepCounts& counts) const override {
    of.call(context, args);
    of.store_results(context);
    check_results(context);
    ++counts.python;
  }

 private:
  // Every call of a Function must give results like those that the capture has seen. If only
  // strides differ, they are corrected.
  void check_results(Context& context) const {
    for (size_t i = 0; i < of.outputs.size(); ++i) {
      const int slot = of.outputs[i];
      if (slot < 0 || !context.spec(slot).known) continue;
      at::Tensor& tensor = context.slots[slot];
      check_learnt(concat(place_of(of), ": result ", i), context.spec(slot), tensor);
      if (!has_layout(tensor, context.spec(slot))) {
        tensor = as_promised(context.graph().value(slot), context.spec(slot), tensor);
      }
    }
  }
};

std::unique_ptr<BoundStep> PythonOpStep::bind(Binder& binder) const {
  return std::make_unique<BoundPythonOp>(*this, binder);
}

}  // namespace

std::unique_ptr<Step> make_python(const CallSite& site) {
  if (!site.op || site.call.op != "torch_ort::call_python") return nullptr;
  return std::make_unique<PythonStep>(site, *site.op, site.call.args);
}

std::unique_ptr<Step> make_python_op(const CallSite& site) {
  if (!site.op || !site.call.op.starts_with("torch_ort::python_op")) return nullptr;
  return std::make_unique<PythonOpStep>(site, *site.op, site.call.args);
}

}  // namespace torch_ort::run
