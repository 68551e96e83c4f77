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

}  // namespace torch_ort::run
