#include "run/variant.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ir/verify.h"
#include "passes/cut_backward.h"
#include "passes/pass.h"
#include "run/context.h"
#include "run/memory/arena.h"
#include "run/memory/owned.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace torch_ort::run {

namespace {

std::unique_ptr<ir::Graph> cut(const CompiledGraph& whole, passes::Cut& asked) {
  const SessionOptions& options = whole.options;
  std::unique_ptr<ir::Graph> graph = ir::clone(*whole.graph);
  passes::PassContext context{.row_sources = options.row_sources, .cut = &asked};
  passes::run_on_variant(*graph, options.disabled_passes, context);
  return graph;
}

// What the options say of gradients, for those that are left.
void keep_gradients(const std::vector<int>& positions, SessionOptions& options) {
  std::vector<int> of_parameters, inputs;
  for (int index : options.parameter_gradients) {
    if (positions.at(index) >= 0) of_parameters.push_back(positions[index]);
  }
  // The remaining gradients are in the order of the whole graph.
  for (size_t i = 0; i < std::min(positions.size(), options.gradient_inputs.size()); ++i) {
    if (positions[i] >= 0) inputs.push_back(options.gradient_inputs[i]);
  }
  options.parameter_gradients = std::move(of_parameters);
  options.gradient_inputs = std::move(inputs);
}

std::vector<std::string> names_of(const CompiledGraph& graph, const std::vector<int>& slots) {
  std::vector<std::string> names;
  for (int slot : slots) names.push_back(graph.value(slot).name);
  return names;
}

// All symbols whose values are known when the backward half begins.
std::vector<std::string> known_symbols(const Context& context) {
  std::vector<std::string> names;
  for (const auto& [name, value] : context.binding->symbols) names.push_back(name);
  for (const auto& [name, value] : context.unbacked_symbols) names.push_back(name);
  return names;
}

}  // namespace

std::shared_ptr<const Variant> whole_variant(std::shared_ptr<PlannedGraph> graph) {
  auto whole = std::make_shared<Variant>();
  const CompiledGraph& compiled = graph->compiled();
  whole->key.defined.assign(compiled.tangents.size(), true);
  whole->gradients.resize(compiled.gradients.size());
  std::iota(whole->gradients.begin(), whole->gradients.end(), 0);
  for (size_t slot = 0; slot < compiled.facts.size(); ++slot) {
    if (compiled.facts[slot].crosses) whole->saved.push_back(static_cast<int>(slot));
  }
  whole->graph = std::move(graph);
  return whole;
}

std::shared_ptr<const Variant> make_variant(const Variant& whole,
                                            const std::vector<bool>& defined) {
  const CompiledGraph& compiled = whole.graph->compiled();
  passes::Cut asked{.defined = defined};
  std::unique_ptr<ir::Graph> graph = cut(compiled, asked);
  if (!asked.zeros.empty() || graph->outputs.empty()) return nullptr;
  SessionOptions options = compiled.options;
  if (options.verify) ir::verify(*graph, "variant");
  keep_gradients(asked.gradients, options);
  const std::vector<std::string> keep = names_of(compiled, whole.saved);

  auto made = std::make_shared<Variant>();
  made->key = {.defined = defined};
  made->gradients = std::move(asked.gradients);
  made->graph =
      std::make_shared<PlannedGraph>(std::move(graph), compiled.constants_by_name(), options, keep);
  const CompiledGraph& cut_down = made->graph->compiled();
  std::unordered_map<std::string, int> slots;
  for (const ir::Value& value : cut_down.graph->values) {
    const auto found = cut_down.slot_of.find(&value);
    if (found != cut_down.slot_of.end()) slots.emplace(value.name, found->second);
  }
  for (const std::string& name : keep) made->saved.push_back(slots.at(name));
  ORT_CHECK(cut_down.saved_inputs == compiled.saved_inputs &&
                cut_down.saved_outputs == compiled.saved_outputs,
            "variant: other inputs or outputs are saved than by the whole");
  // Memory in which the other variants have run would otherwise be held beside that of this plan.
  free_idle_buffers();
  return made;
}

std::shared_ptr<const Variant> make_half(const Variant& whole, const std::vector<bool>& defined,
                                         const Context& context) {
  const CompiledGraph& compiled = whole.graph->compiled();
  passes::Cut asked{.defined = defined, .is_half_alone = true};
  std::unique_ptr<ir::Graph> graph = cut(compiled, asked);
  auto made = std::make_shared<Variant>();
  made->key = {.defined = defined, .is_half = true};
  made->gradients = std::move(asked.gradients);
  // What gives no gradient may still have effects, and a gradient may be one that comes.
  if (graph->nodes.empty() && graph->outputs.empty()) return made;

  std::vector<std::string> names = names_of(compiled, whole.saved);
  for (const std::string& name : names_of(compiled, compiled.tangents)) names.push_back(name);
  for (const ir::Value* input : graph->inputs) {
    const auto found = std::find(names.begin(), names.end(), input->name);
    const bool is_zeros = std::count(asked.zeros.begin(), asked.zeros.end(), input->name) > 0;
    ORT_CHECK(is_zeros == (found == names.end()), "variant: '", input->name, "' is not saved");
    made->inputs.push_back(found - names.begin());
  }
  SessionOptions options = compiled.options;
  options.parameter_gradients.clear();
  graph->symbol_inputs = known_symbols(context);
  if (options.verify) ir::verify(*graph, "variant");
  made->graph =
      std::make_shared<PlannedGraph>(std::move(graph), compiled.constants_by_name(), options);
  return made;
}

PlannedGraph::Tensors Variant::run(const Context& context,
                                   const PlannedGraph::Tensors& tangents) const {
  PlannedGraph::Tensors results(gradients.size());
  if (graph == nullptr) return results;
  const ir::Graph& half = *graph->compiled().graph;
  const auto lookup = [&](const std::string& name) { return context.symbol(name); };
  PlannedGraph::Tensors known, given;
  for (int slot : context.variant->saved) known.push_back(context.slots[slot]);
  known.insert(known.end(), tangents.begin(), tangents.end());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ir::Value& value = *half.inputs[i];
    given.push_back(inputs[i] < known.size() ? known[inputs[i]]
                                             : make_tensor(spec_of(value, lookup)).zero_());
    ORT_CHECK(given.back().defined(), "variant: '", value.name, "' is gone");
  }
  std::vector<int64_t> sizes;
  for (const std::string& name : half.symbol_inputs) {
    const std::optional<int64_t> size = context.symbol(name);
    ORT_CHECK(size.has_value(), "variant: symbol '", name, "' is not bound");
    sizes.push_back(*size);
  }
  const PlannedGraph::Tensors made = graph->run(given, sizes);
  for (size_t i = 0; i < results.size(); ++i) {
    // A gradient that is returned must not share memory with the engine or with the caller.
    if (gradients[i] >= 0) results[i] = owned(made[gradients[i]], given);
  }
  return results;
}

std::vector<bool> first_expected(const CompiledGraph& whole) {
  std::vector<bool> has_no_dims;
  for (int tangent : whole.tangents) {
    const auto& shape = whole.value(tangent).type.shape;
    has_no_dims.push_back(shape && shape->empty());
  }
  const bool are_some =
      std::find(has_no_dims.begin(), has_no_dims.end(), true) != has_no_dims.end();
  return are_some ? has_no_dims : std::vector<bool>(has_no_dims.size(), true);
}

}  // namespace torch_ort::run
