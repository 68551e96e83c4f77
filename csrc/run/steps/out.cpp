#include "run/steps/out.h"

#include "base/error.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/out_forms.h"
#include "run/steps/copy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// Whether the kernel gathers along the last dim (`row_argument` in ops/op.h).
bool works_along_rows(const ops::Call& call) {
  const int argument = ops::registry().operator_row(call.op).row_argument;
  if (argument < 0 || !call.outputs[0]->type.shape) return false;
  const auto* dim = std::get_if<ir::Dim>(&call.args.at(argument).value);
  const auto rank = static_cast<int64_t>(call.outputs[0]->type.shape->size());
  return dim != nullptr && rank > 0 && (*dim == ir::Dim(-1) || *dim == ir::Dim(rank - 1));
}

bool are_row_major(const std::vector<ir::Value*>& values) {
  return std::none_of(values.begin(), values.end(), [](const ir::Value* value) {
    return value != nullptr && value->type.strides.has_value();
  });
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

// The form of an operator that overwrites its first argument, which becomes the result.
std::optional<OutStep> find_overwriting(const CallSite& site) {
  const ops::OverwriteForm* form = find_overwrite_form(site.call);
  if (form == nullptr || site.call.outputs.at(0) == nullptr) return std::nullopt;
  // No kernel writes to such memory.
  if (ops::repeats_elements(site.call.outputs[0]->type)) return std::nullopt;
  const auto op = find_op(form->op, form->overload);
  ORT_CHECK(op.has_value(), "operator ", form->op, " is not registered");
  ops::ArgList args = form->args(site.call.args);
  args.insert(args.begin(), ops::Arg());
  OutStep step(site, *op, args);
  step.args[0] = ArgSource::of_output(0);
  step.effect = is_random(*op);
  if (form->over_operands) step.overwritable = operands_like_result(site);
  return step;
}

struct BoundOut : BoundWriter {
  const OutStep& of;
  std::vector<BoundArg> args;

  BoundOut(const OutStep& called, Binder& binder)
      : BoundWriter(called, binder), of(called), args(called.bind_args(binder)) {}

  void write(Context& context, StepCounts& counts) const override {
    c10::SmallVector<const void*, 4> given;
    for (int slot : of.outputs) given.push_back(context.slots[slot].storage().data());
    of.call(context, args);
    for (size_t i = 0; i < given.size(); ++i) check_written(context, i, given[i]);
    ++counts.out;
  }

 private:
  // Checks that the kernel has written where the plan says. If it has resized the result, or has
  // given it other memory, the planned memory may hold anything.
  void check_written(const Context& context, size_t result, const void* given) const {
    const at::Tensor& tensor = context.slots[of.outputs[result]];
    const TensorSpec& spec = context.spec(of.outputs[result]);
    const bool is_there = tensor.storage().data() == given;
    // Memory that is taken over keeps the strides that its kernel gave it.
    const bool is_laid_out =
        tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
        (takes_over >= 0 || same_strides(spec.sizes, tensor.strides(), spec.strides));
    if (is_there && is_laid_out) [[likely]]
      return;
    const std::string words = concat(
        "run: ", of.op_name(), " (", of.name, of.origin.empty() ? "" : concat(", ", of.origin),
        "): result ", result, ": got ", tensor.sizes(), " with strides ", tensor.strides(),
        is_there ? "" : " in other memory", ", want ", c10::IntArrayRef(spec.sizes),
        " with strides ", c10::IntArrayRef(spec.strides), " in the memory that was given");
    // Other sizes mean that the type is wrong, which a file or a rule of the recorder has stated.
    const bool is_misnamed = tensor.sizes() != c10::IntArrayRef(spec.sizes);
    if (is_misnamed || context.graph().options.is_from_file) throw UserError(words);
    throw InternalError(words);
  }
};

}  // namespace

std::optional<OutStep> find_out_step(const CallSite& site) {
  if (site.is_unbacked || !site.has_known_results()) return std::nullopt;
  if (std::optional<OutStep> step = find_overwriting(site)) return step;
  if (!site.op) return std::nullopt;
  const auto out = find_out_form(*site.op, site.on_cpu);
  if (!out || !(out->any_strides || are_row_major(site.call.outputs))) return std::nullopt;
  OutStep step(site, *site.op, site.call.args);
  // A result that nobody reads has no planned memory to be written to, so the kernel must allocate
  // it.
  if (std::any_of(step.outputs.begin(), step.outputs.end(), [](int slot) { return slot < 0; })) {
    return std::nullopt;
  }
  step.op = out->op;
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    step.args.push_back(ArgSource::of_output(static_cast<int>(i)));
  }
  step.writes_gaps = out->with_gaps;
  if (out->over_operands || (site.on_cpu && out->over_rows && works_along_rows(site.call))) {
    step.overwritable = operands_like_result(site);
  }
  return step;
}

std::unique_ptr<BoundStep> OutStep::bind(Binder& binder) const {
  if (auto copy = bind_copy(*this, binder)) return copy;
  return std::make_unique<BoundOut>(*this, binder);
}

std::unique_ptr<Step> make_out(const CallSite& site) {
  std::optional<OutStep> step = find_out_step(site);
  return step ? std::make_unique<OutStep>(*std::move(step)) : nullptr;
}

}  // namespace torch_ort::run
