#include "run/steps/forms.h"

#include "base/error.h"

#include <algorithm>

namespace torch_ort::run {

int CallSite::slot(const ir::Value* value) const {
  const auto found = slots.find(value);
  ORT_CHECK(found != slots.end(), "run: value '", value->name, "' has no slot");
  return found->second;
}

std::vector<int> CallSite::output_slots() const {
  std::vector<int> outputs;
  for (const ir::Value* value : call.outputs)
    outputs.push_back(value == nullptr ? -1 : slot(value));
  return outputs;
}

bool CallSite::has_known_results() const {
  return std::none_of(call.outputs.begin(), call.outputs.end(), [](const ir::Value* value) {
    return value != nullptr && !value->type.is_known();
  });
}

std::unique_ptr<Step> make_step(const CallSite& site) {
  for (const auto make : kForms) {
    if (std::unique_ptr<Step> step = make(site)) return step;
  }
  throw InternalError(concat("run: no form takes a call of ", site.call.op));
}

}  // namespace torch_ort::run
