#include "passes/dropout.h"

#include "ops/op.h"

namespace torch_ort::passes {

std::optional<double> dropout_ratio(const ir::Node& node) {
  if (!ir::is(&node, "Dropout") || node.inputs.size() != 3 || ir::has_attr(node.attrs, "seed"))
    return std::nullopt;
  const std::optional<double> ratio = ops::known_double(node.inputs[1]);
  const std::optional<double> training = ops::known_double(node.inputs[2]);
  if (!ratio || *ratio <= 0 || *ratio >= 1 || training != 1.0) return std::nullopt;
  return ratio;
}

}  // namespace torch_ort::passes
