#include "run/partial_backward.h"

#include "base/error.h"
#include "ir/verify.h"
#include "run/spec.h"

#include <algorithm>

namespace torch_ort::run {

namespace {

// All that are known when the backward half begins.
std::vector<std::string> known_symbols(const Context& context) {
  std::vector<std::string> names;
  for (const auto& [name, value] : context.binding->symbols) names.push_back(name);
  for (const auto& [name, value] : context.late_symbols) names.push_back(name);
  return names;
}

}  // namespace

PartialBackward::PartialBackward(const Session& whole, const std::vector<bool>& defined,
                                 const Context& context)
    : whole_(whole), cut_(cut_backward(whole.graph(), defined)), symbols_(known_symbols(context)) {
  if (cut_.graph->outputs.empty()) return;
  std::unordered_map<std::string, at::Tensor> constants;
  for (const auto& [slot, tensor] : whole.constants()) {
    constants.emplace(whole.slot_value(slot)->name, tensor);
  }
  SessionOptions options = whole.options_;
  options.parameter_gradients.clear();
  cut_.graph->symbol_inputs = symbols_;
  if (options.verify) ir::verify(*cut_.graph, "cut_backward");
  session_ = Session::compile_body(std::move(cut_.graph), constants, options);
}

Session::Tensors PartialBackward::run(const Context& context) const {
  Session::Tensors gradients(cut_.gradients.size());
  if (session_ == nullptr) return gradients;
  const auto lookup = [&](const std::string& name) { return context.symbol(name); };
  Session::Tensors inputs;
  for (const auto& [value, is_zeros] : cut_.inputs) {
    inputs.push_back(is_zeros ? make_tensor(spec_of(*value, lookup)).zero_()
                              : context.slots[whole_.slots_.at(value)]);
    ORT_CHECK(inputs.back().defined(), "partial backward: '", value->name, "' is gone");
  }
  std::vector<int64_t> symbols;
  for (const std::string& name : symbols_) {
    const std::optional<int64_t> size = context.symbol(name);
    ORT_CHECK(size.has_value(), "partial backward: symbol '", name, "' is not bound");
    symbols.push_back(*size);
  }
  const Session::Tensors made = session_->run_body(inputs, symbols);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (cut_.gradients[i] >= 0) gradients[i] = own(made[cut_.gradients[i]], inputs);
  }
  return gradients;
}

// What looks at memory of the engine, or of the caller, must not leave.
at::Tensor PartialBackward::own(const at::Tensor& gradient, const Session::Tensors& inputs) const {
  const bool is_given = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
    return gradient.is_alias_of(input);
  });
  return is_given ? gradient.clone() : gradient;
}

}  // namespace torch_ort::run
