#include "run/steps/kernel_copy.h"

#include "ops/aten_names.h"
#include "run/binder.h"
#include "run/steps/kernel.h"

namespace torch_ort::run {

std::unique_ptr<BoundStep> bind_kernel_copy(const OutStep& step, Binder& binder) {
  if (step.op.operator_name().name != ops::aten::kCopy || step.outputs.size() != 1) return nullptr;
  const ArgSource& source = step.args.at(1);
  if (source.kind != ArgSource::Kind::kSlot) return nullptr;
  const TensorSpec &from = binder.spec(source.slots[0]), &to = binder.spec(step.outputs[0]);
  if (!from.known || !to.known || from.device != to.device) return nullptr;
  if (from.dtype != to.dtype || from.sizes != to.sizes) return nullptr;
  const ir::Type& type = binder.graph().value(step.outputs[0]).type;
  const region::Codegen* codegen = type.is_known() ? region::codegen_for(type.device) : nullptr;
  if (codegen == nullptr) return nullptr;
  std::shared_ptr<const region::Kernel> kernel =
      codegen->compile_copy(layout_of(source.slots[0], binder), layout_of(step.outputs[0], binder),
                            binder.graph().options.regions);
  if (kernel == nullptr) return nullptr;
  return std::make_unique<BoundKernel>(step, binder, source.slots, std::move(kernel),
                                       &StepCounts::out);
}

}  // namespace torch_ort::run
