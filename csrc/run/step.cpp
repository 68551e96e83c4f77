#include "run/step.h"

#include "base/error.h"
#include "run/describe.h"

#include <algorithm>

namespace torch_ort::run {

void Step::describe(const CompiledGraph& /*graph*/, Description& description) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const int shared = shares(i);
    if (outputs[i] >= 0 && shared >= 0) description.roots[outputs[i]] = description.roots[shared];
  }
}

std::string place_of(const Step& step) {
  return step.origin.empty() ? step.name : concat(step.name, " (", step.origin, ")");
}

std::vector<int> without_repeats(const std::vector<int>& slots) {
  std::vector<int> once;
  for (int slot : slots) {
    if (slot >= 0 && std::find(once.begin(), once.end(), slot) == once.end()) once.push_back(slot);
  }
  return once;
}

}  // namespace torch_ort::run
