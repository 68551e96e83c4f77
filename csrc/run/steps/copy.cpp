#include "run/steps/copy.h"

#include "ops/aten_names.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/kernel.h"
#include "run/word_copy.h"

namespace torch_ort::run {

namespace {

// Copies of fewer bytes take as long as a launch.
constexpr int64_t kLeastBytes = 1 << 20;

struct BoundWordCopy : BoundWriter {
  int from, to;  // slots

  BoundWordCopy(const OutStep& of, int source, Binder& binder)
      : BoundWriter(of, binder), from(source), to(of.outputs[0]) {}

 protected:
  void write(Context& context, StepCounts& counts) const override {
    copy_in_words(context.slots[to], context.slots[from]);
    ++counts.out;
  }
};

// Dense tensors of one layout are copied as one block of memory in any case.
bool are_alike(const TensorSpec& a, const TensorSpec& b) {
  return same_strides(a.sizes, a.strides, b.strides) && is_dense(a);
}

std::unique_ptr<BoundStep> bind_word_copy(const OutStep& step, int source, Binder& binder) {
  const TensorSpec &from = binder.spec(source), &to = binder.spec(step.outputs[0]);
  if (to.bytes < kLeastBytes || are_alike(from, to) || !has_word_copy(from, to.strides)) {
    return nullptr;
  }
  return std::make_unique<BoundWordCopy>(step, source, binder);
}

std::unique_ptr<BoundStep> bind_kernel_copy(const OutStep& step, int source, Binder& binder) {
  std::shared_ptr<const region::Kernel> kernel =
      compile_copy(step, source, layout_of(step.outputs[0], binder), binder);
  if (kernel == nullptr) return nullptr;
  return std::make_unique<BoundKernel>(step, binder, std::vector<int>{source}, std::move(kernel),
                                       &StepCounts::out);
}

}  // namespace

std::shared_ptr<const region::Kernel> compile_copy(const Step& step, int source,
                                                   const region::Layout& to, const Binder& binder) {
  const ir::Type& type = binder.graph().value(step.outputs[0]).type;
  const region::Codegen* codegen = type.is_known() ? region::codegen_for(type.device) : nullptr;
  if (codegen == nullptr) return nullptr;
  return codegen->compile_copy(layout_of(source, binder), to, binder.graph().options.regions);
}

std::unique_ptr<BoundStep> bind_copy(const OutStep& step, Binder& binder) {
  if (step.op.operator_name().name != ops::aten::kCopy || step.outputs.size() != 1) return nullptr;
  const ArgSource& argument = step.args.at(1);
  if (argument.kind != ArgSource::Kind::kSlot) return nullptr;
  const int source = argument.slots[0];
  const TensorSpec &from = binder.spec(source), &to = binder.spec(step.outputs[0]);
  if (!from.known || !to.known || from.device != to.device) return nullptr;
  // Only PyTorch's copy knows of conjugate views.
  if (c10::isComplexType(to.dtype)) return nullptr;
  if (from.dtype != to.dtype || from.sizes != to.sizes) return nullptr;
  return to.device.is_cuda() ? bind_word_copy(step, source, binder)
                             : bind_kernel_copy(step, source, binder);
}

}  // namespace torch_ort::run
