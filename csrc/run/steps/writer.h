// Steps that write their results into memory they are given, and what is done to that memory.
#pragma once

#include "run/binding.h"
#include "run/step.h"

#include <vector>

namespace torch_ort::run {

struct BoundWriter : BoundStep {
  std::vector<int> allocate;    // slots that get memory of their own before the call
  int takes_over = -1;          // slot of an adopted tensor that the result is written into
  std::vector<PartSpec> parts;  // its results in tensors of the caller

  BoundWriter(const Step& of, Binder& binder);

  std::vector<const ViewSpec*> moving_views() const override;
  void run(Context& context, StepCounts& counts) const final;

 protected:
  // With memory in the slots of all results.
  virtual void write(Context& context, StepCounts& counts) const = 0;
};

}  // namespace torch_ort::run
