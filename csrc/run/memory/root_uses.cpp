#include "run/memory/root_uses.h"

#include <algorithm>

namespace torch_ort::run {

RootUses::RootUses(const CompiledGraph& graph, const Description& description)
    : readers(graph.facts.size()),
      sharers(graph.facts.size()),
      leaves(graph.facts.size(), false),
      graph_(graph),
      description_(description) {
  const std::vector<int>& roots = description.roots;
  for (size_t i = 0; i < graph.steps.size(); ++i) {
    for (int slot : graph.steps[i]->reads()) readers[roots[slot]].push_back(i);
  }
  for (size_t slot = 0; slot < roots.size(); ++slot) {
    sharers[roots[slot]].push_back(static_cast<int>(slot));
  }
  for (int slot : graph.outputs) leaves[roots[slot]] = true;
  for (int slot : graph.gradients) leaves[roots[slot]] = true;
}

const Step* RootUses::maker_of(int root) const {
  const SlotFacts& facts = graph_.facts[root];
  if (facts.producer < 0 || facts.unbacked || !description_.specs[root].known || leaves[root] ||
      description_.taken_over[facts.producer] == root) {
    return nullptr;
  }
  const Step& maker = *graph_.steps[facts.producer];
  const std::vector<int>& made = maker.outputs;
  return std::find(made.begin(), made.end(), root) == made.end() ? nullptr : &maker;
}

std::optional<std::vector<TensorSpec>> RootUses::with_strides(
    int root, const std::vector<int64_t>& strides) const {
  std::vector<TensorSpec> found;
  for (int slot : sharers[root]) {
    TensorSpec spec = description_.specs[slot];
    const auto like = strides_like(description_.specs[root], strides, spec);
    if (!like) return std::nullopt;
    spec.strides = *like;
    spec.bytes = span_bytes(spec);
    found.push_back(std::move(spec));
  }
  return found;
}

}  // namespace torch_ort::run
