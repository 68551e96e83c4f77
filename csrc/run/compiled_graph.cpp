#include "run/compiled_graph.h"

#include "base/error.h"
#include "base/failpoint.h"
#include "ops/aten.h"
#include "ops/collective.h"
#include "ops/op.h"
#include "run/autograd/returned_views.h"
#include "run/dtype.h"
#include "run/guard.h"
#include "run/memory/placement.h"
#include "run/out_forms.h"
#include "run/spec.h"
#include "run/steps/forms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>

namespace torch_ort::run {

namespace {

at::Tensor tensor_of(const ir::TensorData& data) {
  at::Tensor tensor =
      at::empty(data.shape, at::TensorOptions().dtype(scalar_type(data.dtype)).device(at::kCPU));
  ORT_CHECK(tensor.nbytes() == data.num_bytes, "initializer: got ", data.num_bytes, " bytes, want ",
            tensor.nbytes());
  if (data.num_bytes > 0) std::memcpy(tensor.mutable_data_ptr(), data.bytes, data.num_bytes);
  return tensor;
}

// The data of a constant is row-major. Its readers depend on the strides of its type, so it is
// copied if these differ.
at::Tensor tensor_of(const ir::Value& value) {
  const at::Tensor tensor = tensor_of(*value.data);
  if (!value.type.strides) return tensor;
  const auto no_symbols = [](const std::string&) -> std::optional<int64_t> { return std::nullopt; };
  const std::vector<int64_t> strides = eval_dims(*value.type.strides, no_symbols);
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

// The device on which the graph runs: that of the first value that is not on the CPU.
c10::Device device_of(const ir::Graph& graph) {
  for (const ir::Value& value : graph.values) {
    if (value.type.device.kind != "cpu") return torch_device(value.type.device);
  }
  return c10::Device(c10::kCPU);
}

void collect_symbols(const ir::Type& type, std::vector<std::string>& names) {
  if (type.shape) {
    for (const ir::Dim& dim : *type.shape) dim.collect_symbols(names);
  }
  if (type.strides) {
    for (const ir::Dim& dim : *type.strides) dim.collect_symbols(names);
  }
}

// The symbols whose values are known when a call begins.
std::set<std::string> bound_symbols(const ir::Graph& graph) {
  std::set<std::string> bound(graph.symbol_inputs.begin(), graph.symbol_inputs.end());
  for (const ir::Value* input : graph.inputs) {
    if (!input->type.shape) continue;
    for (const ir::Dim& dim : *input->type.shape) {
      if (dim.is_symbol()) bound.insert(dim.name());
    }
  }
  return bound;
}

bool may_give_view(const ops::Call& call) {
  const std::optional<c10::OperatorHandle> op = find_op(call.op, call.overload);
  return op &&
         (ops::gives_view(op->schema()) || ops::registry().operator_row(call.op).view_or_copy);
}

// Fills a CompiledGraph in stages, the last of which decides what crosses the border.
class GraphCompiler {
 public:
  GraphCompiler(std::unique_ptr<ir::Graph> graph, const Constants& constants,
                const SessionOptions& options)
      : constants_(constants), graph_(*graph) {
    made_.graph = std::move(graph);
    made_.options = options;
    made_.device = device_of(graph_);
    made_.bound_symbols = bound_symbols(graph_);
  }

  CompiledGraph run(const std::vector<std::string>& keep) {
    may_fail("lower");
    lower_graph();
    keep_for_backward(keep);
    copy_returned_views(made_.calls, made_.num_forward, is_training(), outputs_, gradients_);
    assign_slots();
    take_constants();
    find_late_slots();
    make_steps();
    if (made_.options.is_from_file) check_symbols();
    find_lifetimes();
    return std::move(made_);
  }

 private:
  void lower_graph();
  void keep_for_backward(const std::vector<std::string>& keep);
  void assign_slots();
  void take_constants();
  void find_late_slots();
  std::unordered_set<const ir::Value*> find_leaving() const;
  void make_steps();
  void check_symbols() const;
  void find_lifetimes();
  void note_mutated_inputs(const Step& step);
  void note_crossing_reads(const Step& step);
  void find_saved_outputs();
  void check_crossing_views() const;

  int add_slot(const ir::Value* value);
  bool is_training() const { return made_.yield != nullptr; }

  const Constants& constants_;
  ir::Graph& graph_;
  // Views that are returned are replaced by their copies here.
  std::vector<ir::Value*> outputs_, gradients_;
  CompiledGraph made_;
};

void GraphCompiler::lower_graph() {
  for (const ir::Node& node : graph_.nodes) {
    if (!node.is_erased() && ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) made_.yield = &node;
  }
  made_.calls = ops::lower(graph_, made_.num_forward);
  for (ops::Call& call : made_.calls.calls) {
    if (!is_placeable(call.op)) continue;
    for (ir::Value*& value : call.outputs) {
      // Nobody asks for this gradient, and nothing computes it.
      if (value != nullptr && !value->type.is_known() && value->uses.empty()) value = nullptr;
    }
  }
  prefer_out_forms(made_.calls, made_.device.is_cpu(), made_.num_forward,
                   [this](const ir::Value* value) { return made_.is_unbacked(*value); });
  if (made_.yield != nullptr) {
    outputs_ = made_.yield->inputs;
    if (std::count(outputs_.begin(), outputs_.end(), nullptr) > 0) {
      throw UserError(
          concat("YieldOp '", made_.yield->name, "': an input is left out, want all of them"));
    }
    gradients_ = graph_.outputs;
  } else {
    outputs_ = graph_.outputs;
  }
}

void GraphCompiler::keep_for_backward(const std::vector<std::string>& keep) {
  if (keep.empty()) return;
  const std::set<std::string> names(keep.begin(), keep.end());
  std::vector<ir::Value*> values;
  for (ir::Value& value : graph_.values) {
    if (names.contains(value.name)) values.push_back(&value);
  }
  ORT_CHECK(values.size() == names.size(), "run: got ", values.size(), " values to keep, want ",
            names.size());
  ops::Call call{kKeepCall, "", {}, {}};
  for (ir::Value* value : values) call.args.emplace_back(value);
  made_.calls.calls.insert(
      made_.calls.calls.begin() + static_cast<std::ptrdiff_t>(made_.num_forward), std::move(call));
}

// The slot of a value, which is added if there is none yet.
int GraphCompiler::add_slot(const ir::Value* value) {
  const int next = static_cast<int>(made_.facts.size());
  const auto [found, is_new] = made_.slot_of.try_emplace(value, next);
  if (is_new) made_.facts.push_back({.value = value, .root = next});
  return found->second;
}

// The inputs of the graph have the first slots.
void GraphCompiler::assign_slots() {
  for (const ir::Value* input : graph_.inputs) {
    made_.inputs.push_back(add_slot(input));
    made_.facts[made_.inputs.back()].is_input = true;
  }
  for (const ir::Value* value : graph_.initializers) {
    made_.facts[add_slot(value)].is_constant = true;
  }
  if (is_training()) {
    for (const ir::Value* tangent : made_.yield->outputs) {
      if (tangent == nullptr) continue;
      made_.tangents.push_back(add_slot(tangent));
      made_.facts[made_.tangents.back()].is_input = true;
    }
  }
  for (const ops::Call& call : made_.calls.calls) {
    for (const ir::Value* value : call.outputs) {
      if (value != nullptr) add_slot(value);
    }
  }
  // Constants of a lowering are temporaries with data that no call writes.
  for (const ir::Value& value : made_.calls.temporaries) {
    if (value.data && !made_.slot_of.contains(&value)) {
      made_.facts[add_slot(&value)].is_constant = true;
    }
  }
  for (const ir::Value* value : outputs_) made_.outputs.push_back(made_.slot_of.at(value));
  for (const ir::Value* value : gradients_) made_.gradients.push_back(made_.slot_of.at(value));
}

void GraphCompiler::take_constants() {
  for (const ir::Value& value : made_.calls.temporaries) {
    const auto found = made_.slot_of.find(&value);
    if (found == made_.slot_of.end() || !made_.facts[found->second].is_constant) continue;
    made_.constants.emplace_back(found->second, tensor_of(*value.data));
  }
  for (const ir::Value* value : graph_.initializers) {
    const int slot = made_.slot_of.at(value);
    if (const auto given = constants_.find(value->name); given != constants_.end()) {
      made_.constants.emplace_back(slot, given->second.detach());
    } else if (value->data) {
      made_.constants.emplace_back(slot, tensor_of(*value));
    } else {
      throw UserError(
          concat("initializer '", value->name, "': got no data, want a tensor of this name"));
    }
  }
}

void GraphCompiler::find_late_slots() {
  for (SlotFacts& facts : made_.facts) {
    facts.unbacked = !facts.is_input && !facts.is_constant && made_.is_unbacked(*facts.value);
    made_.has_unbacked_values = made_.has_unbacked_values || facts.unbacked;
  }
}

// What CallSite::leaving is about.
std::unordered_set<const ir::Value*> GraphCompiler::find_leaving() const {
  std::unordered_set<const ir::Value*> leaving;
  if (!is_training()) return leaving;
  leaving.insert(outputs_.begin(), outputs_.end());
  const std::vector<ops::Call>& calls = made_.calls.calls;
  const auto add_operands = [&leaving](const ops::Call& call) {
    for (const ops::Arg& arg : call.args) {
      if (const auto* value = std::get_if<ir::Value*>(&arg.value)) leaving.insert(*value);
    }
  };
  for (size_t i = calls.size(); i-- > 0;) {
    const ops::Call& call = calls[i];
    const bool is_wait = call.op == ops::kWaitTensor;
    if (i >= made_.num_forward) {
      for (const ir::Value* made : call.outputs) leaving.erase(made);
      if (is_wait) add_operands(call);
      continue;
    }
    const bool leaves =
        std::any_of(call.outputs.begin(), call.outputs.end(),
                    [&leaving](const ir::Value* value) { return leaving.contains(value); });
    if (leaves && (is_wait || may_give_view(call))) add_operands(call);
  }
  return leaving;
}

void GraphCompiler::make_steps() {
  const std::unordered_set<const ir::Value*> leaving = find_leaving();
  made_.steps.reserve(made_.calls.calls.size());
  for (const ops::Call& call : made_.calls.calls) {
    const bool is_unbacked =
        std::any_of(call.outputs.begin(), call.outputs.end(), [this](const ir::Value* value) {
          return value != nullptr && made_.facts[made_.slot_of.at(value)].unbacked;
        });
    std::unique_ptr<Step> step = make_step({.call = call,
                                            .op = find_op(call.op, call.overload),
                                            .slots = made_.slot_of,
                                            .constants = constants_,
                                            .options = made_.options,
                                            .on_cpu = made_.device.is_cpu(),
                                            .is_unbacked = is_unbacked,
                                            .graph = made_,
                                            .leaving = leaving});
    const ir::Node* node = call.node;
    step->name = node != nullptr ? node->name : call.op;
    if (node != nullptr) {
      step->origin = node->origin;
      step->binds_symbol = ir::string_attr(node->attrs, "binds_symbol", "");
      step->effect = step->effect || !ops::is_pure(*node);
    }
    made_.has_unbacked_values = made_.has_unbacked_values || !step->binds_symbol.empty();
    const int index = static_cast<int>(made_.steps.size());
    for (size_t i = 0; i < step->outputs.size(); ++i) {
      if (step->outputs[i] < 0) continue;
      SlotFacts& facts = made_.facts[step->outputs[i]];
      facts.producer = index;
      if (const int shared = step->shares(i); shared >= 0) facts.root = made_.facts[shared].root;
    }
    made_.steps.push_back(std::move(step));
  }
}

// Checks that each symbol that a step evaluates has a value by then: from the inputs, or from a
// result of an earlier step.
void GraphCompiler::check_symbols() const {
  std::set<std::string> bound = made_.bound_symbols;
  const auto check = [&bound](const Step& step, const ir::Dim& dim) {
    std::vector<std::string> names;
    dim.collect_symbols(names);
    for (const std::string& name : names) {
      if (bound.contains(name)) continue;
      throw UserError(concat("run: ", step.op_name(), " of node '", step.name, "': symbol '", name,
                             "': got no value, want one of an input or of an earlier result"));
    }
  };
  for (const auto& step : made_.steps) {
    for (const ir::Dim& dim : step->dims()) check(*step, dim);
    if (!step->binds_symbol.empty()) bound.insert(step->binds_symbol);
    for (int slot : step->outputs) {
      if (slot < 0 || !made_.value(slot).type.shape) continue;
      for (const ir::Dim& dim : *made_.value(slot).type.shape) {
        if (dim.is_symbol()) bound.insert(dim.name());
      }
    }
  }
}

void GraphCompiler::find_lifetimes() {
  for (const std::vector<int>* slots : {&made_.outputs, &made_.gradients}) {
    for (int slot : *slots) made_.facts[made_.facts[slot].root].leaves = true;
  }
  for (size_t i = 0; i < made_.steps.size(); ++i) {
    note_mutated_inputs(*made_.steps[i]);
    if (i >= made_.num_forward) note_crossing_reads(*made_.steps[i]);
  }
  for (size_t i = 0; i < made_.inputs.size(); ++i) {
    if (made_.facts[made_.inputs[i]].crosses) made_.saved_inputs.push_back(static_cast<int>(i));
  }
  if (!is_training()) return;
  find_saved_outputs();
  check_crossing_views();
}

void GraphCompiler::note_mutated_inputs(const Step& step) {
  for (int slot : step.mutates()) {
    const auto input = std::find(made_.inputs.begin(), made_.inputs.end(), made_.facts[slot].root);
    if (input == made_.inputs.end()) continue;
    const int index = static_cast<int>(input - made_.inputs.begin());
    std::vector<int>& noted = made_.mutated_inputs;
    if (std::find(noted.begin(), noted.end(), index) == noted.end()) noted.push_back(index);
  }
}

void GraphCompiler::note_crossing_reads(const Step& step) {
  for (int slot : step.reads()) {
    SlotFacts& facts = made_.facts[slot];
    const bool is_given = facts.is_input && slot < static_cast<int>(made_.inputs.size());
    const bool is_made =
        facts.producer >= 0 && facts.producer < static_cast<int>(made_.num_forward);
    if (is_given || is_made) facts.crosses = true;
  }
}

void GraphCompiler::find_saved_outputs() {
  const std::vector<int>& outputs = made_.outputs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto here = outputs.begin() + static_cast<std::ptrdiff_t>(i);
    const bool is_first = std::find(outputs.begin(), here, outputs[i]) == here;
    const SlotFacts& facts = made_.facts[outputs[i]];
    if (facts.crosses && !facts.is_input && is_first) {
      made_.saved_outputs.push_back(static_cast<int>(i));
    }
  }
}

// A view that crosses the border must be one of the engine's memory. The pass replay_views makes
// all other views again in the backward half, from the tensor that autograd saves.
void GraphCompiler::check_crossing_views() const {
  for (const SlotFacts& facts : made_.facts) {
    const SlotFacts& root = made_.facts[facts.root];
    const bool is_view = &root != &facts;
    ORT_CHECK(!(facts.crosses && is_view && (root.is_input || root.leaves)), "run: value '",
              facts.value->name, "' crosses the border as a view of '", root.value->name,
              "', which the caller holds");
  }
}

}  // namespace

bool CompiledGraph::is_unbacked(const ir::Value& value) const {
  if (!value.type.is_known()) return true;
  if (torch_device(value.type.device).type() != device.type()) return true;
  std::vector<std::string> symbols;
  collect_symbols(value.type, symbols);
  return std::any_of(symbols.begin(), symbols.end(),
                     [&](const std::string& name) { return !bound_symbols.contains(name); });
}

bool CompiledGraph::is_saved_output(int slot) const {
  return std::any_of(saved_outputs.begin(), saved_outputs.end(),
                     [&](int index) { return outputs[index] == slot; });
}

Constants CompiledGraph::constants_by_name() const {
  Constants by_name;
  for (const auto& [slot, tensor] : constants) by_name.emplace(value(slot).name, tensor);
  return by_name;
}

std::shared_ptr<const CompiledGraph> compile_graph(std::unique_ptr<ir::Graph> graph,
                                                   const Constants& constants,
                                                   const SessionOptions& options,
                                                   const std::vector<std::string>& keep) {
  // A graph may be compiled while PyTorch traces. Its constants must be real tensors nevertheless.
  const RunGuard guard{c10::Device(c10::kCPU)};
  return std::make_shared<const CompiledGraph>(
      GraphCompiler(std::move(graph), constants, options).run(keep));
}

}  // namespace torch_ort::run
