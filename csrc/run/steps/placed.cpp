// The kernel allocates its results, and gets the memory that the plan has chosen (placement.h).
#include "base/error.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/memory/placement.h"
#include "run/steps/operator.h"
#include "run/steps/writer.h"

#include <c10/util/SmallVector.h>

namespace torch_ort::run {

namespace {

struct PlacedStep : OperatorStep {
  using OperatorStep::OperatorStep;

  const char* form() const override { return "placed"; }
  bool writes_given_memory() const override { return true; }
  bool takes_workspace() const override { return true; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundPlaced : BoundWriter {
  const PlacedStep& of;
  std::vector<BoundArg> args;
  AllocationNumbers numbers;
  std::vector<plan::Workspace> workspaces;

  BoundPlaced(const PlacedStep& called, Binder& binder)
      : BoundWriter(called, binder),
        of(called),
        args(called.bind_args(binder)),
        numbers(called.outputs.size()),
        workspaces(binder.workspaces()) {}

  // Results that are not in their places are copied. The next call knows which allocations they
  // came from.
  void write(Context& context, StepCounts& counts) const override {
    Placement placement;
    offer_memory(context, placement);
    of.call(context, args);
    c10::SmallVector<std::pair<size_t, at::Tensor>, 3> elsewhere;
    for (size_t i = 0; i < of.outputs.size(); ++i) {
      if (of.outputs[i] < 0) continue;
      const at::Tensor& made = context.stack.at(i).toTensor();
      // Attributes of a file may ask for another set of results than its nodes name.
      if (!made.defined()) {
        throw UserError(concat("run: ", of.name, ": result ", i, " is missing"));
      }
      if (is_in_place(context, i, placement)) continue;
      // The result has other strides than planned, or is in the place of another result.
      elsewhere.emplace_back(i, placement.has_placed(made.storage().data()) ? made.clone() : made);
    }
    for (const auto& [i, made] : elsewhere) {
      context.slots[of.outputs[i]].copy_(made);
      counters().results_copied.fetch_add(1, std::memory_order_relaxed);
    }
    elsewhere.clear();
    context.stack.clear();
    ORT_CHECK(placement.is_over(), "run: ", of.name, ": the kernel keeps memory of the engine");
    ++counts.out;
  }

 private:
  void offer_memory(const Context& context, Placement& placement) const {
    for (const plan::Workspace& space : workspaces) {
      const bool in_context = space.area == plan::Area::kContext;
      char* const area = in_context ? context.context_data() : context.scratch_data;
      if (area != nullptr) placement.add_workspace(area + space.offset, space.bytes);
    }
    for (size_t i = 0; i < of.outputs.size(); ++i) {
      if (of.outputs[i] < 0) continue;
      placement.expect(numbers[i].load(std::memory_order_relaxed),
                       context.slots[of.outputs[i]].mutable_data_ptr(),
                       context.spec(of.outputs[i]).bytes);
    }
  }

  // Whether a result is in its place. If not, the allocation that it came from is noted.
  bool is_in_place(const Context& context, size_t result, const Placement& placement) const {
    const int slot = of.outputs[result];
    const at::Tensor& made = context.stack.at(result).toTensor();
    const TensorSpec& spec = context.spec(slot);
    check_sizes(context.graph().value(slot), spec, made);
    const bool is_there = made.const_data_ptr() == context.slots[slot].const_data_ptr();
    if (made.numel() == 0 || (is_there && has_layout(made, spec))) return true;
    std::atomic<int>& number = numbers[result];
    if (number.load(std::memory_order_relaxed) != AllocationNumbers::kNever) {
      number.store(
          is_there ? AllocationNumbers::kNever : placement.number_of(made.storage().data()),
          std::memory_order_relaxed);
    }
    return false;
  }
};

std::unique_ptr<BoundStep> PlacedStep::bind(Binder& binder) const {
  return std::make_unique<BoundPlaced>(*this, binder);
}

}  // namespace

std::unique_ptr<Step> make_placed(const CallSite& site) {
  if (site.is_unbacked || !site.on_cpu || !is_placeable(site.call.op) ||
      !site.has_known_results()) {
    return nullptr;
  }
  return site.op ? std::make_unique<PlacedStep>(site, *site.op, site.call.args) : nullptr;
}

}  // namespace torch_ort::run
