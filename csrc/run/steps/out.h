// Calls an `out=` kernel, or an in-place kernel on new memory, which writes into given memory.
#pragma once

#include "run/steps/operator.h"
#include "run/steps/writer.h"

#include <memory>
#include <optional>
#include <vector>

namespace torch_ort::run {

struct OutStep : OperatorStep {
  std::vector<int> overwritable;  // slots
  bool writes_gaps = false;       // the kernel can write results that have gaps

  using OperatorStep::OperatorStep;

  const char* form() const override { return "out"; }
  bool writes_given_memory() const override { return true; }
  bool writes_strided_memory() const override { return writes_gaps; }
  std::vector<int> in_place() const override { return overwritable; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

// Makes a step that calls the overload that is proved to write such results; nothing if there is
// none.
std::optional<OutStep> find_out_step(const CallSite& site);

}  // namespace torch_ort::run
