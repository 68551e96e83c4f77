#include "run/memory/parts.h"

#include <algorithm>

namespace torch_ort::run {

namespace {

// Whether elements that lie side by side do so with other strides.
bool keeps_runs(const TensorSpec& spec, const std::vector<int64_t>& strides) {
  for (size_t i = 0; i < strides.size(); ++i) {
    if (spec.sizes[i] > 1 && spec.strides[i] == 1 && strides[i] != 1) return false;
  }
  return true;
}

}  // namespace

PartPlacer::PartPlacer(const CompiledGraph& graph, Description& description, const RootUses& uses)
    : graph_(graph), result_(description), uses_(uses) {
  result_.parts.resize(graph_.facts.size());
}

void PartPlacer::run() {
  for (size_t i = 0; i < graph_.steps.size(); ++i) {
    const auto* concat = dynamic_cast<const ConcatStep*>(graph_.steps[i].get());
    if (concat != nullptr) place_parts_of(*concat, i);
  }
}

void PartPlacer::place_parts_of(const ConcatStep& concat, size_t step) {
  const int whole = concat.outputs.at(0);
  if (whole < 0 || !can_hold_parts(whole)) return;
  std::vector<ViewSpec> rest;
  const std::vector<ViewSpec> pieces = pieces_of(concat, result_.specs);
  for (const ViewSpec& piece : pieces) {
    if (!place(piece, whole, step)) rest.push_back(piece);
  }
  if (rest.size() == pieces.size()) return;
  result_.rests[static_cast<int>(step)] = std::move(rest);
}

bool PartPlacer::can_hold_parts(int whole) const {
  const TensorSpec& spec = result_.specs[whole];
  if (!spec.known || graph_.facts[whole].unbacked || spec.bytes == 0) return false;
  if (result_.roots[whole] != whole) return false;
  // A later reader of a part would read what was written over the whole.
  return std::none_of(graph_.steps.begin(), graph_.steps.end(), [&](const auto& step) {
    const std::vector<int> written = step->mutates();
    return std::any_of(written.begin(), written.end(),
                       [&](int slot) { return result_.roots[slot] == whole; });
  });
}

std::vector<ViewSpec> pieces_of(const ConcatStep& concat, const std::vector<TensorSpec>& specs) {
  const TensorSpec& whole = specs[concat.outputs[0]];
  const auto rank = static_cast<int64_t>(whole.sizes.size());
  int64_t axis = concat.axis();
  if (axis < 0) axis += rank;
  if (axis < 0 || axis >= rank) return {};
  std::vector<ViewSpec> pieces;
  int64_t begin = 0;
  for (int slot : concat.operands()) {
    const TensorSpec& part = specs[slot];
    if (!part.known || part.sizes.size() != whole.sizes.size()) return {};
    std::vector<int64_t> sizes = whole.sizes;
    sizes[axis] = part.sizes[axis];
    if (part.sizes != sizes) return {};
    const int64_t offset = begin * whole.strides[axis];
    if (part.bytes > 0) pieces.push_back({slot, part.sizes, whole.strides, offset});
    begin += part.sizes[axis];
  }
  if (begin != whole.sizes[axis]) return {};
  return pieces;
}

bool PartPlacer::place(const ViewSpec& piece, int whole, size_t concat) {
  const int root = result_.roots[piece.slot];
  if (!can_be_made_elsewhere(root, whole, concat)) return false;
  const TensorSpec& as_read = result_.specs[piece.slot];
  const auto of_root = strides_like(as_read, piece.strides, result_.specs[root]);
  if (!of_root) return false;
  if (needs_runs(root) && !keeps_runs(result_.specs[root], *of_root)) return false;
  std::optional<std::vector<TensorSpec>> specs = uses_.with_strides(root, *of_root);
  if (!specs) return false;
  for (size_t i = 0; i < specs->size(); ++i) {
    const int slot = uses_.sharers[root][i];
    result_.specs[slot] = std::move((*specs)[i]);
    result_.roots[slot] = whole;
    result_.parts[slot] = {whole, root, piece.offset};
  }
  return true;
}

bool PartPlacer::can_be_made_elsewhere(int root, int whole, size_t concat) const {
  // A part that has its place already, such as an operand that occurs twice, has the whole as its
  // root.
  const Step* maker = uses_.maker_of(root);
  if (maker == nullptr || !maker->writes_strided_memory() ||
      is_in_forward(graph_.facts[root].producer) != is_in_forward(concat)) {
    return false;
  }
  if (crosses(root) && (!crosses(whole) || uses_.leaves[whole])) return false;
  const TensorSpec& to = result_.specs[whole];
  if (to.dtype != result_.specs[root].dtype || to.device != result_.specs[root].device)
    return false;
  return std::all_of(uses_.readers[root].begin(), uses_.readers[root].end(),
                     [this](size_t step) { return graph_.steps[step]->reads_gaps(result_); });
}

bool PartPlacer::needs_runs(int root) const {
  return uses_.maker_of(root)->needs_runs() ||
         std::any_of(uses_.readers[root].begin(), uses_.readers[root].end(),
                     [this](size_t step) { return graph_.steps[step]->needs_runs(); });
}

bool PartPlacer::is_in_forward(size_t step) const { return step < graph_.num_forward; }

bool PartPlacer::crosses(int root) const {
  return std::any_of(uses_.sharers[root].begin(), uses_.sharers[root].end(),
                     [this](int slot) { return graph_.facts[slot].crosses; });
}

}  // namespace torch_ort::run
