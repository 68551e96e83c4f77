// A concatenation. It copies only those operands that are not written in place.
#pragma once

#include "run/steps/out.h"

#include <memory>
#include <vector>

namespace torch_ort::run {

struct ConcatStep : OutStep {
  explicit ConcatStep(OutStep out) : OutStep(std::move(out)) {}

  const std::vector<int>& operands() const { return args[0].slots; }
  int64_t axis() const { return args[1].constant.toInt(); }

  bool reads_gaps(const Description& /*description*/) const override { return true; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

}  // namespace torch_ort::run
