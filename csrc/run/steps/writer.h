// Steps that write their results into given memory, and the preparation of that memory.
#pragma once

#include "run/binding.h"
#include "run/step.h"

#include <vector>

namespace torch_ort::run {

struct BoundWriter : BoundStep {
  std::vector<int> allocate;  // slots for which to allocate memory before the call
  // The slot of an adopted tensor that the result overwrites; -1: none.
  int takes_over = -1;
  // The results that are parts of tensors of the caller.
  std::vector<PartSpec> parts;

  BoundWriter(const Step& of, Binder& binder);

  std::vector<const ViewSpec*> moving_views() const override;
  void run(Context& context, StepCounts& counts) const final;

 protected:
  // Called when the slots of all results have memory.
  virtual void write(Context& context, StepCounts& counts) const = 0;
};

}  // namespace torch_ort::run
