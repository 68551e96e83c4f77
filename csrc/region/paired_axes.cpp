#include "region/paired_axes.h"

namespace torch_ort::region {

std::vector<PairedAxis> merge(const std::vector<PairedAxis>& axes) {
  std::vector<PairedAxis> merged;
  for (const PairedAxis& axis : axes) {
    if (axis.size == 1) continue;
    if (!merged.empty() && merged.back().a == axis.size * axis.a &&
        merged.back().b == axis.size * axis.b) {
      merged.back() = {merged.back().size * axis.size, axis.a, axis.b};
    } else {
      merged.push_back(axis);
    }
  }
  return merged;
}

}  // namespace torch_ort::region
