// Steps that run a kernel of region/codegen.h, compiled for one set of sizes.
#pragma once

#include "region/codegen.h"
#include "run/counters.h"
#include "run/steps/writer.h"

#include <memory>
#include <vector>

namespace torch_ort::run {

// The layout of a slot whose sizes are known.
region::Layout layout_of(int slot, const Binder& binder);

struct BoundKernel : BoundWriter {
  std::vector<int> operands;  // slots
  std::shared_ptr<const region::Kernel> kernel;
  int64_t StepCounts::* count;  // the counter of such steps

  BoundKernel(const Step& of, Binder& binder, std::vector<int> slots,
              std::shared_ptr<const region::Kernel> made, int64_t StepCounts::* counted);

  std::string program() const override { return kernel->str(); }
  std::optional<region::ListedRows> listed() const override { return kernel->listed(); }

 protected:
  void write(Context& context, StepCounts& counts) const override;
};

}  // namespace torch_ort::run
