#include "run/steps/concat.h"

#include "ops/aten_names.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/memory/parts.h"
#include "run/word_copy.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// PyTorch's kernel that copies several parts at once takes no more dims; it copies others one by
// one, element by element.
constexpr size_t kMostDimsOfKernel = 4;

void copy_parts(const Context& context, const at::Tensor& whole,
                const std::vector<ViewSpec>& parts) {
  for (const ViewSpec& part : parts) {
    const at::Tensor place = whole.as_strided(part.sizes, part.strides, part.offset);
    const at::Tensor& from = context.slots[part.slot];
    if (whole.is_cuda() && from.dtype() == whole.dtype()) {
      copy_in_words(place, from);
    } else {
      place.copy_(from);
    }
  }
}

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
    copy_parts(context, whole, rest);
    ++counts.out;
  }
};

// A concatenation of which each part is copied.
struct BoundCopies : BoundWriter {
  std::vector<ViewSpec> parts_of_whole;

  BoundCopies(const ConcatStep& of, Binder& binder, std::vector<ViewSpec> copied)
      : BoundWriter(of, binder), parts_of_whole(std::move(copied)) {}

  const char* form() const override { return "copies"; }

 protected:
  void write(Context& context, StepCounts& counts) const override {
    copy_parts(context, context.slots[step.outputs[0]], parts_of_whole);
    ++counts.out;
  }
};

// The parts, if the step copies them faster than PyTorch's kernel for concatenations.
std::vector<ViewSpec> parts_in_words(const ConcatStep& step, const Binder& binder) {
  const TensorSpec& whole = binder.spec(step.outputs[0]);
  if (!whole.device.is_cuda() || !whole.known || whole.sizes.size() <= kMostDimsOfKernel) return {};
  std::vector<ViewSpec> parts = pieces_of(step, binder.specs());
  const bool fits = std::all_of(parts.begin(), parts.end(), [&](const ViewSpec& part) {
    const TensorSpec& spec = binder.spec(part.slot);
    return spec.dtype == whole.dtype && has_word_copy(spec, part.strides);
  });
  return fits ? parts : std::vector<ViewSpec>{};
}

}  // namespace

std::unique_ptr<BoundStep> ConcatStep::bind(Binder& binder) const {
  if (auto rest = binder.rest()) return std::make_unique<BoundConcat>(*this, *std::move(rest));
  if (auto parts = parts_in_words(*this, binder); !parts.empty()) {
    return std::make_unique<BoundCopies>(*this, binder, std::move(parts));
  }
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
