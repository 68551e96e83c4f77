#include "run/steps/view.h"

#include "base/error.h"
#include "ops/aten.h"
#include "ops/op.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/guard.h"

#include <ATen/TensorUtils.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// The slot of the first tensor argument.
int viewed_slot(const OperatorStep& step) {
  for (const ArgSource& arg : step.args) {
    if (arg.kind == ArgSource::Kind::kSlot) return arg.slots[0];
  }
  throw InternalError(concat("run: view ", step.op_name(), " has no tensor argument"));
}

struct ViewStep : OperatorStep {
  int base;

  ViewStep(const CallSite& site, const c10::OperatorHandle& op)
      : OperatorStep(site, op, site.call.args), base(viewed_slot(*this)) {}

  const char* form() const override { return "view"; }
  int shares(size_t /*result*/) const override { return base; }
  bool is_view() const override { return true; }
  // A view whose arguments are strides names those of dense memory.
  bool reads_gaps(const Description& /*description*/) const override {
    return !op.schema().argumentIndexWithName("stride").has_value();
  }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override {
    return std::make_unique<BoundView>(*this, base, binder);
  }
};

// A view if the strides of the operand allow it, else a copy.
struct ReshapeStep : OperatorStep {
  int base;

  ReshapeStep(const CallSite& site, const c10::OperatorHandle& op)
      : OperatorStep(site, op, site.call.args), base(viewed_slot(*this)) {}

  const char* form() const override { return "reshape"; }
  int shares(size_t /*result*/) const override { return base; }
  bool is_view() const override { return true; }
  bool reads_gaps(const Description& description) const override {
    return description.roots[outputs[0]] != outputs[0];
  }

  // Readers depend on the strides that the type of a value states. A temporary of a lowering gets
  // the strides of the view.
  void describe(const CompiledGraph& graph, Description& description) const override {
    const TensorSpec& from = description.specs[base];
    TensorSpec& to = description.specs[outputs[0]];
    if (!from.known || !to.known || graph.facts[outputs[0]].unbacked) return;
    const auto strides = at::detail::computeStride(
        c10::IntArrayRef(from.sizes), c10::IntArrayRef(from.strides), c10::IntArrayRef(to.sizes));
    if (!strides) return;
    const bool is_temporary = graph.value(outputs[0]).producer == nullptr;
    if (is_temporary) to.strides.assign(strides->begin(), strides->end());
    if (same_strides(to.sizes, *strides, to.strides)) Step::describe(graph, description);
  }

  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundReshapeCopy : BoundCall<ReshapeStep> {
  using BoundCall::BoundCall;

  const char* form() const override { return "functional"; }

  void run(Context& context, StepCounts& counts) const override {
    of.call(context, args);
    own_result(context);
    of.store_results(context);
    ++counts.functional;
  }

 private:
  // Copies a result that the plan takes for a copy, but that is a view, since the next step might
  // overwrite the memory that it views.
  void own_result(Context& context) const {
    const at::Tensor result = context.stack.back().toTensor();
    if (!context.spec(of.base).known || !result.is_alias_of(context.slots[of.base])) return;
    const TensorSpec& spec = context.spec(of.outputs[0]);
    context.stack.back() = spec.known
                               ? as_promised(context.graph().value(of.outputs[0]), spec, result)
                               : result.clone(at::MemoryFormat::Contiguous);
  }
};

std::unique_ptr<BoundStep> ReshapeStep::bind(Binder& binder) const {
  if (binder.has_own_memory(outputs[0])) return std::make_unique<BoundReshapeCopy>(*this, binder);
  return std::make_unique<BoundView>(*this, base, binder);
}

// Whether the results stay inside of the graph, so that the engine's own tensor objects can be
// moved to other memory. Operators that name strides count an offset from the beginning of memory
// of which a caller's tensor may be only a part.
bool may_move(const OperatorStep& step, const Binder& binder) {
  if (ops::registry().operator_row(step.op.schema().name()).names_strides) return false;
  const CompiledGraph& graph = binder.graph();
  const auto stays = [&graph](int slot) {
    const auto is_in = [slot](const std::vector<int>& slots) {
      return std::find(slots.begin(), slots.end(), slot) != slots.end();
    };
    return slot < 0 || (!graph.facts[slot].unbacked && !is_in(graph.outputs) &&
                        !is_in(graph.gradients) && !graph.facts[slot].crosses);
  };
  return std::all_of(step.outputs.begin(), step.outputs.end(), stays);
}

}  // namespace

BoundView::BoundView(const OperatorStep& step, int viewed, Binder& binder)
    : BoundStep(step), of(step), base(viewed), args(step.bind_args(binder)) {
  const auto is_part = [&](int slot) { return slot >= 0 && binder.is_part(slot); };
  if (std::any_of(of.outputs.begin(), of.outputs.end(), is_part)) {
    // It is made with the part.
    is_done = true;
    return;
  }
  if (of.outputs.empty()) return;
  const plan::Kind kind = binder.kind_of(base);
  is_done = has_known_args() && binder.stands_from_the_start(base) &&
            (kind == plan::Kind::kPlanned || kind == plan::Kind::kConstant);
  if (is_done) {
    binder.add_static(*this);
  } else if (binder.spec(base).known && may_move(of, binder)) {
    describe_views(binder);
  }
}

bool BoundView::has_known_args() const {
  return std::none_of(args.begin(), args.end(),
                      [](const BoundArg& arg) { return arg.is_unbacked(); });
}

// Runs the view on a tensor without memory to learn the sizes and strides of the results.
void BoundView::describe_views(const Binder& binder) {
  const TensorSpec& spec = binder.spec(base);
  torch::jit::Stack stack;
  for (const BoundArg& arg : args) {
    if (arg.kind == BoundArg::Kind::kConstant) {
      stack.emplace_back(arg.constant);
    } else if (arg.kind == BoundArg::Kind::kSlot && arg.slot == base) {
      stack.emplace_back(tensor_over(storage_without_memory(spec.bytes, spec.device), spec, 0));
    } else {
      return;
    }
  }
  RunGuard guard(binder.graph().device);
  of.op.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& result : stack) {
    if (result.isTensorList()) {
      for (const c10::IValue& element : result.toListRef()) results.push_back(element.toTensor());
    } else {
      results.push_back(result.toTensor());
    }
  }
  if (results.size() < of.outputs.size()) return;
  for (size_t i = 0; i < of.outputs.size(); ++i) {
    if (of.outputs[i] < 0) continue;
    if (results[i].scalar_type() != spec.dtype) {
      views.clear();
      return;
    }
    views.push_back({of.outputs[i], results[i].sizes().vec(), results[i].strides().vec(),
                     results[i].storage_offset()});
  }
}

std::vector<const ViewSpec*> BoundView::moving_views() const {
  std::vector<const ViewSpec*> moving;
  for (const ViewSpec& view : views) moving.push_back(&view);
  return moving;
}

// Returns false if the base has other sizes or strides than were planned.
bool BoundView::move_views(Context& context) const {
  if (views.empty()) return false;
  const at::Tensor& viewed = context.slots[base];
  const TensorSpec& spec = context.spec(base);
  if (viewed.strides() != c10::IntArrayRef(spec.strides) ||
      viewed.sizes() != c10::IntArrayRef(spec.sizes)) {
    return false;
  }
  for (const ViewSpec& view : views) {
    context.point(view, viewed.storage(), viewed.storage_offset() + view.offset);
  }
  return true;
}

void BoundView::run(Context& context, StepCounts& counts) const {
  if (move_views(context)) return;
  of.call(context, args);
  of.store_results(context);
  ++counts.view;
}

void BoundView::make_static(Context& context) const {
  of.call(context, args);
  of.store_results(context);
  context.stack.clear();
  // The next view relies on the layout of this one: a reshape that is not a view would copy memory
  // whose contents do not exist yet.
  for (int slot : of.outputs) {
    if (slot < 0 || !context.spec(slot).known) continue;
    check_layout(context.graph().value(slot), context.spec(slot), context.slots[slot]);
  }
}

std::unique_ptr<Step> make_view(const CallSite& site) {
  if (!site.op || !ops::gives_view(site.op->schema())) return nullptr;
  return std::make_unique<ViewStep>(site, *site.op);
}

std::unique_ptr<Step> make_reshape(const CallSite& site) {
  if (!site.op || !ops::registry().operator_row(site.call.op).view_or_copy) return nullptr;
  return std::make_unique<ReshapeStep>(site, *site.op);
}

}  // namespace torch_ort::run
