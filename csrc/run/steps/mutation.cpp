// The operator modifies arguments. Its results, if any, are these arguments or have memory of their
// own.
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/operator.h"

namespace torch_ort::run {

namespace {

struct MutationStep : OperatorStep {
  std::vector<int> written;  // slots
  // The outputs from this number on are the `written` tensors after the call.
  size_t num_returns;

  MutationStep(const CallSite& site, const c10::OperatorHandle& op)
      : OperatorStep(site, op, site.call.args), num_returns(op.schema().returns().size()) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      for (int slot : args[i].slots) {
        if (slot >= 0) written.push_back(slot);
      }
    }
  }

  const char* form() const override { return "mutation"; }
  std::vector<int> mutates() const override { return written; }

  int shares(size_t result) const override {
    if (result >= num_returns) {
      const size_t which = result - num_returns;
      return which < written.size() ? written[which] : -1;
    }
    const auto* alias = op.schema().returns()[result].alias_info();
    return alias != nullptr && alias->isWrite() && written.size() == 1 ? written[0] : -1;
  }

  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundMutation : BoundCall<MutationStep> {
  using BoundCall::BoundCall;

  void run(Context& context, StepCounts& counts) const override {
    of.call(context, args);
    of.store_results(context);
    if (of.binds_symbol.empty()) {
      for (size_t i = of.num_returns; i < of.outputs.size(); ++i) {
        context.store(of.outputs[i], context.slots[of.written.at(i - of.num_returns)]);
      }
    }
    ++counts.functional;
  }
};

std::unique_ptr<BoundStep> MutationStep::bind(Binder& binder) const {
  return std::make_unique<BoundMutation>(*this, binder);
}

}  // namespace

std::unique_ptr<Step> make_mutation(const CallSite& site) {
  if (!site.op || !site.op->schema().is_mutable()) return nullptr;
  return std::make_unique<MutationStep>(site, *site.op);
}

}  // namespace torch_ort::run
