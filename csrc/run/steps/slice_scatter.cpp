// A tensor of which a part is replaced (ops/slice_scatter.h). The result is written over the base
// if the plan lets it; then only the part is written.
#include "ops/slice_scatter.h"

#include "base/error.h"
#include "region/codegen.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/copy.h"
#include "run/steps/forms.h"
#include "run/steps/kernel.h"
#include "run/word_copy.h"

#include <utility>

namespace torch_ort::run {

namespace {

struct SliceScatterStep : Step {
  int part, base = -1;  // slots; no base: zeros
  std::vector<ops::Stretch> replaced;

  explicit SliceScatterStep(const CallSite& site)
      : part(site.slot(std::get<ir::Value*>(site.call.args.at(0).value))),
        replaced(ops::replaced_part(*site.call.node)) {
    if (site.call.args.size() > 1) base = site.slot(std::get<ir::Value*>(site.call.args[1].value));
    outputs = site.output_slots();
  }

  const char* form() const override { return "slice_scatter"; }
  std::string op_name() const override { return "torch_ort.SliceScatter"; }
  std::vector<int> reads() const override { return without_repeats({part, base}); }
  bool writes_given_memory() const override { return true; }
  std::vector<int> in_place() const override {
    return base < 0 || base == part ? std::vector<int>() : std::vector<int>{base};
  }
  bool reads_gaps(const Description& /*description*/) const override { return true; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundSliceScatter : BoundWriter {
  const SliceScatterStep& of;
  ViewSpec place;                                // of the part in the result
  std::shared_ptr<const region::Kernel> kernel;  // nullptr: PyTorch's copy

  BoundSliceScatter(const SliceScatterStep& made_for, Binder& binder, ViewSpec part_of_result,
                    std::shared_ptr<const region::Kernel> copy)
      : BoundWriter(made_for, binder),
        of(made_for),
        place(std::move(part_of_result)),
        kernel(std::move(copy)) {}

 protected:
  void write(Context& context, StepCounts& counts) const override {
    const at::Tensor& whole = context.slots[step.outputs[0]];
    if (of.base < 0) {
      whole.zero_();
    } else if (const at::Tensor& base = context.slots[of.base];
               base.const_data_ptr() != whole.const_data_ptr()) {
      whole.copy_(base);
    }
    write_part(context, whole);
    ++counts.out;
  }

 private:
  void write_part(const Context& context, const at::Tensor& whole) const {
    const at::Tensor& part = context.slots[of.part];
    if (kernel != nullptr && has_layout(part, context.spec(of.part)) &&
        !is_computed_by_reader(part)) {
      const void* from = part.const_data_ptr();
      void* to = static_cast<char*>(whole.mutable_data_ptr()) +
                 place.offset * static_cast<int64_t>(whole.element_size());
      kernel->run(&from, &to);
      return;
    }
    const at::Tensor to =
        whole.as_strided(place.sizes, place.strides, whole.storage_offset() + place.offset);
    if (whole.is_cuda()) {
      copy_in_words(to, part);
    } else {
      to.copy_(part);
    }
  }
};

// The part as a view of the result.
ViewSpec place_of_part(const SliceScatterStep& step, const Binder& binder) {
  const TensorSpec &whole = binder.spec(step.outputs[0]), &part = binder.spec(step.part);
  ViewSpec place{.slot = step.part, .sizes = part.sizes, .strides = whole.strides};
  bool fits = part.dtype == whole.dtype && part.sizes.size() == whole.sizes.size() &&
              part.sizes.size() == step.replaced.size();
  for (size_t i = 0; fits && i < part.sizes.size(); ++i) {
    const auto& [begin, size, stride] = step.replaced[i];
    fits = ops::is_within(begin, part.sizes[i], stride, whole.sizes[i]);
    if (!fits || part.sizes[i] == 0) continue;
    // The step of a single element may be any number, and does not matter.
    place.strides[i] = whole.strides[i] * (part.sizes[i] > 1 ? stride : 1);
    place.offset += begin * whole.strides[i];
  }
  if (!fits) {
    throw UserError(concat("run: torch_ort.SliceScatter of node '", step.name, "': got a part of ",
                           c10::IntArrayRef(part.sizes), ", want one that fits into ",
                           c10::IntArrayRef(whole.sizes), " of the same dtype"));
  }
  return place;
}

std::unique_ptr<BoundStep> SliceScatterStep::bind(Binder& binder) const {
  ViewSpec place = place_of_part(*this, binder);
  const region::Layout to = {layout_of(part, binder).dtype, place.sizes, place.strides};
  std::shared_ptr<const region::Kernel> kernel = compile_copy(*this, part, to, binder);
  return std::make_unique<BoundSliceScatter>(*this, binder, std::move(place), std::move(kernel));
}

}  // namespace

std::unique_ptr<Step> make_slice_scatter(const CallSite& site) {
  if (site.is_unbacked || site.call.op != ops::kSliceScatterCall) return nullptr;
  return std::make_unique<SliceScatterStep>(site);
}

}  // namespace torch_ort::run
