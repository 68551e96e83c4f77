// If and Loop: each body is a planned graph of its own, which the step runs without the GIL. To the
// plan the step looks like a kernel that allocates its results.
//
// The symbols of the outer graph are passed with each call of a body, and an integer input of a
// body may be a symbol.
#include "ops/control_flow.h"

#include "base/error.h"
#include "ir/edit.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/dtype.h"
#include "run/memory/owned.h"
#include "run/planned_graph.h"
#include "run/steps/forms.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <limits>

namespace torch_ort::run {

namespace {

at::Tensor single(const at::Tensor& tensor, const std::string& node, const char* what) {
  if (tensor.numel() != 1) {
    throw UserError(
        concat("run: ", node, ": ", what, ": got ", tensor.numel(), " elements, want one"));
  }
  return tensor;
}

bool holds(const at::Tensor& condition, const std::string& node) {
  return single(condition, node, "condition").item().toBool();
}

int64_t integer(const at::Tensor& tensor, const std::string& node, const char* what) {
  return single(tensor, node, what).item().toLong();
}

// Runs the bodies of a node, and moves values between their runs.
class ControlFlow {
 public:
  using Tensors = PlannedGraph::Tensors;
  // Gives the value of a symbol of the outer graph; nothing if it has none yet.
  using Lookup = ir::SymbolLookup;

  // A node with closed bodies (ops/control_flow.h).
  ControlFlow(const ir::Node& node, const Constants& constants, const SessionOptions& options);

  // Returns one tensor for each output of the node. None of them shares memory with an input or the
  // engine. Undefined inputs stand for those that are left out.
  Tensors run(const Tensors& inputs, const Lookup& lookup) const;

  void free_idle_contexts() const;
  std::string op_name() const { return is_loop_ ? "Loop" : "If"; }

 private:
  // Where a body finds the value of a symbol: in the outer graph, or in an integer input.
  struct Symbol {
    std::string name;
    int input;  // of the body; -1: outer graph
  };
  struct Body {
    std::shared_ptr<PlannedGraph> graph;
    std::vector<Symbol> symbols;
  };

  void add_body(const ir::Node& node, const char* name, const Constants& constants,
                const SessionOptions& options);
  Tensors run_body(const Body& body, const Tensors& inputs, const Lookup& lookup) const;
  Tensors run_loop(const Tensors& inputs, const Lookup& lookup) const;
  at::Tensor stacked(const Tensors& rounds, size_t output, const Lookup& lookup) const;
  // Copies results that share memory with others or with inputs.
  void own(Tensors& results, const Tensors& inputs) const;

  std::string name_;
  bool is_loop_ = false;
  size_t num_carried_ = 0;
  c10::Device device_{c10::kCPU};
  std::vector<Body> bodies_;  // of an If: for true and for false
};

ControlFlow::ControlFlow(const ir::Node& node, const Constants& constants,
                         const SessionOptions& options)
    : name_(node.name), is_loop_(node.op.name == "Loop"), num_carried_(ops::num_carried(node)) {
  ops::check_bodies(node);
  if (is_loop_) {
    add_body(node, "body", constants, options);
  } else {
    add_body(node, "then_branch", constants, options);
    add_body(node, "else_branch", constants, options);
  }
}

void ControlFlow::add_body(const ir::Node& node, const char* name, const Constants& constants,
                           const SessionOptions& options) {
  const auto& graph = std::get<std::shared_ptr<ir::Graph>>(node.attrs.at(name));
  SessionOptions of_body = options;
  of_body.parameter_gradients.clear();
  Body body{.graph = std::make_shared<PlannedGraph>(ir::clone(*graph), constants, of_body),
            .symbols = {}};
  const CompiledGraph& compiled = body.graph->compiled();
  const bool is_training = compiled.yield != nullptr;
  if (is_training || !compiled.mutated_inputs.empty()) {
    throw Unsupported(
        concat(node.op.str(), " '", node.name, "': ", name, " ",
               is_training ? "has a backward half" : "writes into a value from outside"));
  }
  for (const std::string& symbol : graph->symbol_inputs) {
    const auto input = std::find_if(graph->inputs.begin(), graph->inputs.end(),
                                    [&](const ir::Value* value) { return value->name == symbol; });
    const bool is_input = input != graph->inputs.end();
    body.symbols.push_back(
        {symbol, is_input ? static_cast<int>(input - graph->inputs.begin()) : -1});
  }
  device_ = compiled.device;
  bodies_.push_back(std::move(body));
}

void ControlFlow::free_idle_contexts() const {
  for (const Body& body : bodies_) body.graph->free_idle_contexts();
}

ControlFlow::Tensors ControlFlow::run_body(const Body& body, const Tensors& inputs,
                                           const Lookup& lookup) const {
  std::vector<int64_t> symbols;
  for (const auto& [symbol, input] : body.symbols) {
    if (input >= 0) {
      symbols.push_back(integer(inputs[input], name_, symbol.c_str()));
      continue;
    }
    const std::optional<int64_t> value = lookup(symbol);
    if (!value) throw UserError(concat("run: ", name_, ": symbol '", symbol, "' has no value"));
    symbols.push_back(*value);
  }
  return body.graph->run(inputs, symbols);
}

ControlFlow::Tensors ControlFlow::run(const Tensors& inputs, const Lookup& lookup) const {
  Tensors results;
  if (is_loop_) {
    results = run_loop(inputs, lookup);
  } else {
    const Body& taken = bodies_[holds(inputs[0], name_) ? 0 : 1];
    results = run_body(taken, {inputs.begin() + 1, inputs.end()}, lookup);
  }
  own(results, inputs);
  return results;
}

ControlFlow::Tensors ControlFlow::run_loop(const Tensors& inputs, const Lookup& lookup) const {
  const int64_t rounds = inputs[0].defined() ? integer(inputs[0], name_, "rounds")
                                             : std::numeric_limits<int64_t>::max();
  at::Tensor condition = inputs[1].defined()
                             ? inputs[1]
                             : at::scalar_tensor(true, at::TensorOptions().dtype(at::kBool));
  const Body& body = bodies_[0];
  const size_t num_scanned = body.graph->compiled().outputs.size() - 1 - num_carried_;
  std::vector<Tensors> scanned(num_scanned);
  Tensors given = inputs;  // of the current round
  for (int64_t round = 0; round < rounds && holds(condition, name_); ++round) {
    given[0] = at::scalar_tensor(round, at::TensorOptions().dtype(at::kLong));
    given[1] = condition;
    Tensors made = run_body(body, given, lookup);
    condition = made[0];
    std::move(made.begin() + 1, made.begin() + 1 + static_cast<std::ptrdiff_t>(num_carried_),
              given.begin() + 2);
    for (size_t i = 0; i < num_scanned; ++i) scanned[i].push_back(made[1 + num_carried_ + i]);
  }
  Tensors results(given.begin() + 2, given.begin() + 2 + static_cast<std::ptrdiff_t>(num_carried_));
  for (size_t i = 0; i < num_scanned; ++i) {
    results.push_back(stacked(scanned[i], 1 + num_carried_ + i, lookup));
  }
  return results;
}

// If there was no round, sizes that only a round determines are 0, as in other implementations of
// ONNX.
at::Tensor ControlFlow::stacked(const Tensors& rounds, size_t output, const Lookup& lookup) const {
  if (!rounds.empty()) return at::stack(rounds);
  const ir::Value& value = *bodies_[0].graph->compiled().graph->outputs[output];
  if (value.type.dtype == ir::DType::kUndefined || !value.type.shape) {
    throw Unsupported(concat("run: ", name_, ": no round tells the dtype of '", value.name, "'"));
  }
  std::vector<int64_t> sizes = {0};
  for (const ir::Dim& dim : *value.type.shape) sizes.push_back(dim.evaluate(lookup).value_or(0));
  return at::empty(sizes, at::TensorOptions().dtype(scalar_type(value.type.dtype)).device(device_));
}

void ControlFlow::own(Tensors& results, const Tensors& inputs) const {
  Tensors others = inputs;
  for (const Body& body : bodies_) {
    for (const auto& [slot, constant] : body.graph->compiled().constants) {
      others.push_back(constant);
    }
  }
  for (at::Tensor& result : results) result = owned(result, others);
}

struct ControlFlowStep : Step {
  std::vector<int> operands;  // slots; -1: left out
  ControlFlow control_flow;

  explicit ControlFlowStep(const CallSite& site)
      : control_flow(*site.call.node, site.constants, site.options) {
    for (const ops::Arg& arg : site.call.args) {
      operands.push_back(arg.is_none() ? -1 : site.slot(std::get<ir::Value*>(arg.value)));
    }
    outputs = site.output_slots();
  }

  const char* form() const override { return "control_flow"; }
  std::string op_name() const override { return control_flow.op_name(); }
  std::vector<int> reads() const override { return without_repeats(operands); }
  void free_idle_contexts() const override { control_flow.free_idle_contexts(); }
  std::string why_host_is_needed() const override { return "the host chooses what runs"; }
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

struct BoundControlFlow : BoundStep {
  const ControlFlowStep& of;

  explicit BoundControlFlow(const ControlFlowStep& called) : BoundStep(called), of(called) {}

  void run(Context& context, StepCounts& counts) const override {
    PlannedGraph::Tensors inputs;
    for (int slot : of.operands) inputs.push_back(slot < 0 ? at::Tensor() : context.slots[slot]);
    PlannedGraph::Tensors results = of.control_flow.run(
        inputs, [&context](const std::string& name) { return context.symbol(name); });
    for (size_t i = 0; i < of.outputs.size(); ++i) {
      const int slot = of.outputs[i];
      if (slot < 0) continue;
      const TensorSpec& spec = context.spec(slot);
      // The two branches may give a value in different layouts.
      if (spec.known && !has_layout(results[i], spec)) {
        results[i] = as_promised(context.graph().value(slot), spec, results[i]);
      }
      context.store(slot, std::move(results[i]));
    }
    ++counts.functional;
  }
};

std::unique_ptr<BoundStep> ControlFlowStep::bind(Binder& /*binder*/) const {
  return std::make_unique<BoundControlFlow>(*this);
}

}  // namespace

std::unique_ptr<Step> make_control_flow(const CallSite& site) {
  if (site.call.node == nullptr || !ops::is_closed(*site.call.node)) return nullptr;
  return std::make_unique<ControlFlowStep>(site);
}

}  // namespace torch_ort::run
