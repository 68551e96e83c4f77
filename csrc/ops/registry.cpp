// The registry, and what can be asked of a whole graph through it: types, and the opset it needs.
#include "base/error.h"
#include "ops/function.h"
#include "ops/op.h"

#include <algorithm>
#include <memory>

namespace torch_ort::ops {

namespace {

// The engine writes no ops of older opsets.
constexpr int kOldestOpset = 12;

bool has_unknown_output(const ir::Node& node) {
  return std::any_of(node.outputs.begin(), node.outputs.end(), [](const ir::Value* value) {
    return value != nullptr && !value->type.is_known();
  });
}

void fill_in(ir::Type& type, const ir::Type& inferred) {
  if (type.dtype == ir::DType::kUndefined) {
    type.dtype = inferred.dtype;
    type.device = inferred.device;
  }
  if (!type.shape) {
    type.shape = inferred.shape;
    type.strides = inferred.strides;
  }
}

bool contradict(const ir::Type& one, const ir::Type& other) {
  if (one.is_known() && other.is_known() && one.dtype != other.dtype) return true;
  if (!one.shape || !other.shape) return false;
  if (one.shape->size() != other.shape->size()) return true;
  return !std::equal(one.shape->begin(), one.shape->end(), other.shape->begin(),
                     [](const ir::Dim& a, const ir::Dim& b) {
                       return !a.is_constant() || !b.is_constant() || a == b;
                     });
}

void check_types(const ir::Node& node, const std::vector<ir::Type>& types) {
  for (size_t i = 0; i < std::min(types.size(), node.outputs.size()); ++i) {
    const ir::Value* output = node.outputs[i];
    if (output == nullptr || !contradict(output->type, types[i])) continue;
    throw UserError(concat(node.op.str(), ": type of output '", output->name, "' of node '",
                           node.name, "': got ", ir::to_string(output->type), ", want ",
                           ir::to_string(types[i])));
  }
}

}  // namespace

void Registry::add(Op op) {
  const std::string key = ir::OpId{op.domain, op.name}.str();
  ORT_CHECK(ops_.emplace(key, std::move(op)).second, "registry: two ops are called ", key);
}

void Registry::add(Operator op) {
  const std::string key = op.name;
  ORT_CHECK(operators_.emplace(key, std::move(op)).second, "registry: two operators are called ",
            key);
}

const Operator& Registry::operator_row(const std::string& name) const {
  static const Operator none;
  const auto found = operators_.find(name);
  return found == operators_.end() ? none : found->second;
}

const Op* Registry::find(const ir::OpId& id) const {
  static const Op function = function_op();
  if (is_function(id)) return &function;
  auto found = ops_.find(id.domain.empty() ? id.name : id.str());
  return found == ops_.end() ? nullptr : &found->second;
}

std::vector<const Op*> Registry::all() const {
  std::vector<const Op*> all;
  all.reserve(ops_.size());
  for (const auto& [key, op] : ops_) all.push_back(&op);
  std::sort(all.begin(), all.end(), [](const Op* a, const Op* b) {
    return a->domain != b->domain ? a->domain < b->domain : a->name < b->name;
  });
  return all;
}

std::vector<std::string> Registry::operator_names() const {
  std::vector<std::string> names;
  names.reserve(operators_.size());
  for (const auto& [name, row] : operators_) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

void check_inputs(const ir::Node& node) {
  const Op* op = registry().find(node.op);
  if (op == nullptr) return;
  const auto count = static_cast<int>(node.inputs.size());
  const bool too_many = op->max_inputs >= 0 && count > op->max_inputs;
  if (count >= op->min_inputs && !too_many) return;
  throw UserError(concat(node.op.str(), ": inputs of node '", node.name, "': got ", count,
                         ", want ", too_many ? "at most " : "at least ",
                         too_many ? op->max_inputs : op->min_inputs));
}

void infer_types(ir::Node& node) {
  const Op* op = registry().find(node.op);
  if (op == nullptr || op->infer == nullptr) return;
  // The text form has sizes, but no strides of views.
  const bool looks_at_input = is_view(node);
  if (!has_unknown_output(node) && !looks_at_input) return;
  check_inputs(node);
  const std::vector<ir::Type> types = op->infer(node);
  const size_t count = std::min(types.size(), node.outputs.size());
  for (size_t i = 0; i < count; ++i) {
    if (node.outputs[i] == nullptr) continue;
    fill_in(node.outputs[i]->type, types[i]);
    if (looks_at_input && !node.outputs[i]->type.strides) {
      node.outputs[i]->type.strides = types[i].strides;
    }
  }
}

void infer_types(const ir::Graph& graph, ir::Node& node) {
  if (node.is_erased() || registry().find(node.op) == nullptr) return;
  const bool is_older = graph.opset > 0 && first_opset(node) > graph.opset;
  if (!is_older) infer_types(node);
}

void infer_types(ir::Graph& graph) {
  for (ir::Node& node : graph.nodes) infer_types(graph, node);
}

void check_types(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    const Op* op = node.is_erased() ? nullptr : registry().find(node.op);
    const bool is_older = graph.opset > 0 && first_opset(node) > graph.opset;
    if (op == nullptr || op->infer == nullptr || is_older) continue;
    std::vector<ir::Type> types;
    try {
      types = op->infer(node);
    } catch (const Unsupported&) {
      // The rule needs something that is not known here, so the declared type stays.
      continue;
    }
    check_types(node, types);
  }
}

int required_opset(const ir::Graph& graph) {
  int opset = kOldestOpset;
  for (const ir::Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    opset = std::max(opset, first_opset(node));
    for (const auto& [name, attr] : node.attrs) {
      const auto* subgraph = std::get_if<std::shared_ptr<ir::Graph>>(&attr);
      if (subgraph != nullptr) opset = std::max(opset, required_opset(**subgraph));
    }
  }
  return opset;
}

}  // namespace torch_ort::ops
