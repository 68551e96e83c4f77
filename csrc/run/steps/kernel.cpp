#include "run/steps/kernel.h"

#include "base/error.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/dtype.h"

#include <c10/util/SmallVector.h>

namespace torch_ort::run {

region::Layout layout_of(int slot, const Binder& binder) {
  const TensorSpec& spec = binder.spec(slot);
  ORT_CHECK(spec.known, "run: kernel: the size of '", binder.graph().value(slot).name,
            "' is not known");
  return {run::dtype(spec.dtype), spec.sizes, spec.strides};
}

BoundKernel::BoundKernel(const Step& of, Binder& binder, std::vector<int> slots,
                         std::shared_ptr<const region::Kernel> made, int64_t StepCounts::* counted)
    : BoundWriter(of, binder),
      operands(std::move(slots)),
      kernel(std::move(made)),
      count(counted) {}

void BoundKernel::write(Context& context, StepCounts& counts) const {
  c10::SmallVector<const void*, 32> inputs;
  c10::SmallVector<void*, 8> outputs;
  c10::SmallVector<at::Tensor, 2> copies;
  for (int slot : operands) {
    const at::Tensor& tensor = context.slots[slot];
    const TensorSpec& spec = context.spec(slot);
    if (has_layout(tensor, spec)) {
      inputs.push_back(tensor.const_data_ptr());
    } else {
      copies.push_back(as_promised(context.graph().value(slot), spec, tensor));
      inputs.push_back(copies.back().const_data_ptr());
    }
  }
  for (int slot : step.outputs) outputs.push_back(context.slots[slot].mutable_data_ptr());
  kernel->run(inputs.data(), outputs.data());
  ++(counts.*count);
}

}  // namespace torch_ort::run
