#include "run/partial_backward.h"

#include "base/error.h"
#include "ir/verify.h"
#include "run/arena.h"
#include "run/context.h"
#include "run/owned.h"
#include "run/spec.h"

#include <algorithm>

namespace torch_ort::run {

namespace {

// All symbols whose values are known when the backward half begins.
std::vector<std::string> known_symbols(const Context& context) {
  std::vector<std::string> names;
  for (const auto& [name, value] : context.binding->symbols) names.push_back(name);
  for (const auto& [name, value] : context.unbacked_symbols) names.push_back(name);
  return names;
}

}  // namespace

std::vector<bool> first_expected(const CompiledGraph& whole) {
  std::vector<bool> has_no_dims;
  for (int tangent : whole.tangents) {
    const auto& shape = whole.value(tangent).type.shape;
    has_no_dims.push_back(shape && shape->empty());
  }
  const auto losses = std::count(has_no_dims.begin(), has_no_dims.end(), true);
  const bool are_some = losses > 0 && losses < static_cast<ptrdiff_t>(has_no_dims.size());
  return are_some ? has_no_dims : std::vector<bool>();
}

std::shared_ptr<const ExpectedBackward> make_expected_backward(const CompiledGraph& whole,
                                                               const std::vector<bool>& defined) {
  std::optional<CutTraining> cut = cut_training(*whole.graph, defined);
  if (!cut) return nullptr;
  SessionOptions options = whole.options;
  options.parameter_gradients.clear();
  for (int index : whole.options.parameter_gradients) {
    const int position = cut->gradients.at(index);
    if (position >= 0) options.parameter_gradients.push_back(position);
  }
  options.gradient_inputs.clear();
  for (size_t i = 0; i < cut->gradients.size() && i < whole.options.gradient_inputs.size(); ++i) {
    // The remaining gradients are in the order of the whole graph.
    if (cut->gradients[i] >= 0) {
      options.gradient_inputs.push_back(whole.options.gradient_inputs[i]);
    }
  }
  std::vector<const ir::Value*> read;
  for (const SlotFacts& facts : whole.facts) {
    if (facts.crosses) read.push_back(facts.value);
  }
  for (const ir::Value* value : read) options.keep.push_back(cut->copies.at(value)->name);
  if (options.verify) ir::verify(*cut->graph, "cut_training");
  if (options.after_cut) {
    options.after_cut(*cut->graph);
    if (options.verify) ir::verify(*cut->graph, "after_cut");
  }

  auto expected = std::make_shared<ExpectedBackward>();
  expected->defined = defined;
  expected->gradients = std::move(cut->gradients);
  expected->session =
      Session::compile_body(std::move(cut->graph), whole.constants_by_name(), options);
  const CompiledGraph& compiled = expected->session->compiled();
  for (const ir::Value* value : read) {
    expected->slots[value] = compiled.slot_of.at(cut->copies.at(value));
  }
  ORT_CHECK(
      compiled.saved_inputs == whole.saved_inputs && compiled.saved_outputs == whole.saved_outputs,
      "expected backward: other inputs or outputs are saved than by the whole");
  // Memory in which the other plan and the partial backward have run would otherwise be held beside
  // that of this plan.
  free_idle_buffers();
  return expected;
}

PartialBackward::PartialBackward(std::shared_ptr<const CompiledGraph> whole,
                                 const std::vector<bool>& defined, const Context& context)
    : whole_(std::move(whole)),
      cut_(cut_backward(*whole_->graph, defined)),
      symbols_(known_symbols(context)) {
  // What gives no gradient may still have effects.
  if (cut_.graph->nodes.empty()) return;
  SessionOptions options = whole_->options;
  options.parameter_gradients.clear();
  cut_.graph->symbol_inputs = symbols_;
  if (options.verify) ir::verify(*cut_.graph, "cut_backward");
  session_ = Session::compile_body(std::move(cut_.graph), whole_->constants_by_name(), options);
}

Session::Tensors PartialBackward::run(const Context& context,
                                      const Session::Tensors& tangents) const {
  Session::Tensors gradients(cut_.gradients.size());
  if (session_ == nullptr) return gradients;
  const auto lookup = [&](const std::string& name) { return context.symbol(name); };
  Session::Tensors inputs;
  for (const auto& [value, is_zeros] : cut_.inputs) {
    inputs.push_back(is_zeros ? make_tensor(spec_of(*value, lookup)).zero_()
                              : read(value, context, tangents));
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
    // A gradient that is returned must not share memory with the engine or with the caller.
    if (cut_.gradients[i] >= 0) gradients[i] = owned(made[cut_.gradients[i]], inputs);
  }
  return gradients;
}

at::Tensor PartialBackward::read(const ir::Value* value, const Context& context,
                                 const Session::Tensors& tangents) const {
  const int slot = whole_->slot_of.at(value);
  const std::vector<int>& given = whole_->tangents;
  const auto tangent = std::find(given.begin(), given.end(), slot);
  if (tangent != given.end()) return tangents[tangent - given.begin()];
  return context.slots[context.expected ? context.expected->slots.at(value) : slot];
}

void PartialBackward::free_idle_contexts() const {
  if (session_ != nullptr) session_->free_idle_contexts();
}

}  // namespace torch_ort::run
