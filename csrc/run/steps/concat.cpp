#include "run/steps/concat.h"

#include "ops/aten_names.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"

#include <ATen/core/Tensor.h>

namespace torch_ort::run {

namespace {

// A concatenation some of whose parts were written in place. The step of the first part has
// allocated the memory of the whole.
struct BoundConcat : BoundStep {
  // The other parts: which slots to copy, and to where in the whole.
  std::vector<ViewSpec> rest;

  BoundConcat(const ConcatStep& of, std::vector<ViewSpec> copied)
      : BoundStep(of), rest(std::move(copied)) {
    is_done = rest.empty();
  }

  const char* form() const override { return "parts"; }

  void run(Context& context, StepCounts& counts) const override {
    const at::Tensor& whole = context.slots[step.outputs[0]];
    for (const ViewSpec& part : rest) {
      whole.as_strided(part.sizes, part.strides, part.offset).copy_(context.slots[part.slot]);
    }
    ++counts.out;
  }
};

}  // namespace

std::unique_ptr<BoundStep> ConcatStep::bind(Binder& binder) const {
  if (auto rest = binder.rest()) return std::make_unique<BoundConcat>(*this, *std::move(rest));
  return OutStep::bind(binder);
}

std::unique_ptr<Step> make_concat(const CallSite& site) {
  if (site.call.op != ops::aten::kCat) return nullptr;
  std::optional<OutStep> out = find_out_step(site);
  const bool is_simple =
      out && out->args.size() == 3 && out->args[0].kind == ArgSource::Kind::kSlotList &&
      out->args[1].kind == ArgSource::Kind::kConstant && out->args[1].constant.isInt();
  return is_simple ? std::make_unique<ConcatStep>(*std::move(out)) : nullptr;
}

}  // namespace torch_ort::run
