#include "run/control_flow.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ops/control_flow.h"
#include "run/dtype.h"
#include "run/spec.h"

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

bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

}  // namespace

ControlFlow::ControlFlow(const ir::Node& node,
                         const std::unordered_map<std::string, at::Tensor>& constants,
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

void ControlFlow::add_body(const ir::Node& node, const char* name,
                           const std::unordered_map<std::string, at::Tensor>& constants,
                           const SessionOptions& options) {
  const auto& graph = std::get<std::shared_ptr<ir::Graph>>(node.attrs.at(name));
  SessionOptions of_body = options;
  of_body.parameter_gradients.clear();
  Body body{.session = Session::compile_body(ir::clone(*graph), constants, of_body), .symbols = {}};
  if (body.session->is_training() || body.session->writes_inputs()) {
    throw Unsupported(concat(
        node.op.str(), " '", node.name, "': ", name, " ",
        body.session->is_training() ? "has a backward half" : "writes into a value from outside"));
  }
  for (const std::string& symbol : graph->symbol_inputs) {
    const auto input = std::find_if(graph->inputs.begin(), graph->inputs.end(),
                                    [&](const ir::Value* value) { return value->name == symbol; });
    const bool is_input = input != graph->inputs.end();
    body.symbols.push_back(
        {symbol, is_input ? static_cast<int>(input - graph->inputs.begin()) : -1});
  }
  device_ = body.session->device();
  bodies_.push_back(std::move(body));
}

void ControlFlow::free_idle_contexts() const {
  for (const Body& body : bodies_) body.session->free_idle_contexts();
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
  return body.session->run_body(inputs, symbols);
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
  const size_t num_scanned = body.session->num_outputs() - 1 - num_carried_;
  std::vector<Tensors> scanned(num_scanned);
  Tensors given = inputs;  // of one round
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

// Without a round, sizes that only one would tell are 0, as everywhere else where ONNX runs.
at::Tensor ControlFlow::stacked(const Tensors& rounds, size_t output, const Lookup& lookup) const {
  if (!rounds.empty()) return at::stack(rounds);
  const ir::Value& value = *bodies_[0].session->graph().outputs[output];
  if (value.type.dtype == ir::DType::kUndefined || !value.type.shape) {
    throw Unsupported(concat("run: ", name_, ": no round tells the dtype of '", value.name, "'"));
  }
  std::vector<int64_t> sizes = {0};
  for (const ir::Dim& dim : *value.type.shape) sizes.push_back(dim.evaluate(lookup).value_or(0));
  return at::empty(sizes, at::TensorOptions().dtype(scalar_type(value.type.dtype)).device(device_));
}

void ControlFlow::own(Tensors& results, const Tensors& inputs) const {
  const auto is_foreign = [&](const at::Tensor& result) {
    const auto shares = [&](const at::Tensor& other) { return shares_memory(result, other); };
    if (std::any_of(inputs.begin(), inputs.end(), shares)) return true;
    return std::any_of(bodies_.begin(), bodies_.end(), [&](const Body& body) {
      const auto& constants = body.session->constants();
      return std::any_of(constants.begin(), constants.end(),
                         [&](const auto& constant) { return shares(constant.second); });
    });
  };
  for (at::Tensor& result : results) {
    if (is_foreign(result)) result = result.clone();
  }
}

}  // namespace torch_ort::run
