#include "run/root_uses.h"

#include "run/step.h"

namespace torch_ort::run {

RootUses::RootUses(const CompiledGraph& graph, const std::vector<int>& roots)
    : readers(roots.size()), sharers(roots.size()), leaves(roots.size(), false) {
  for (size_t i = 0; i < graph.steps.size(); ++i) {
    for (int slot : graph.steps[i]->reads()) readers[roots[slot]].push_back(i);
  }
  for (size_t slot = 0; slot < roots.size(); ++slot) {
    sharers[roots[slot]].push_back(static_cast<int>(slot));
  }
  for (int slot : graph.outputs) leaves[roots[slot]] = true;
  for (int slot : graph.gradients) leaves[roots[slot]] = true;
}

std::optional<std::vector<TensorSpec>> RootUses::with_strides(
    int root, const std::vector<int64_t>& strides, const std::vector<TensorSpec>& specs) const {
  std::vector<TensorSpec> found;
  for (int slot : sharers[root]) {
    TensorSpec spec = specs[slot];
    const auto like = strides_like(specs[root], strides, spec);
    if (!like) return std::nullopt;
    spec.strides = *like;
    spec.bytes = span_bytes(spec);
    found.push_back(std::move(spec));
  }
  return found;
}

}  // namespace torch_ort::run
