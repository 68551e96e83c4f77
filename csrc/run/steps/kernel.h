// Steps of which one set of sizes makes a kernel of region/codegen.h.
#pragma once

#include "region/codegen.h"
#include "run/counters.h"
#include "run/steps/writer.h"

#include <memory>
#include <vector>

namespace torch_ort::run {

// How the tensor of a slot lies, whose size is known.
region::Layout layout_of(int slot, const Binder& binder);

struct BoundKernel : BoundWriter {
  std::vector<int> operands;  // slots
  std::shared_ptr<const region::Kernel> kernel;
  int64_t StepCounts::* count;  // what such a step counts as

  BoundKernel(const Step& of, Binder& binder, std::vector<int> slots,
              std::shared_ptr<const region::Kernel> made, int64_t StepCounts::* counted);

  std::string program() const override { return kernel->str(); }
  std::optional<region::ListedRows> listed() const override { return kernel->listed(); }

 protected:
  void write(Context& context, StepCounts& counts) const override;
};

}  // namespace torch_ort::run
