// If and Loop, as ONNX has them and with closed bodies. run/steps/control_flow.cpp runs the
// latter.
#include "ops/control_flow.h"

#include "base/error.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Type;
using Symbols = std::unordered_set<std::string>;

bool is_loop(const Node& node) { return node.op.name == "Loop"; }

void collect(const Dim& dim, Symbols& symbols) {
  std::vector<std::string> names;
  dim.collect_symbols(names);
  symbols.insert(names.begin(), names.end());
}

void collect(const ir::Shape& shape, Symbols& symbols) {
  for (const Dim& dim : shape) collect(dim, symbols);
}

std::string symbol_name(const std::string& value, size_t axis) {
  std::string name = concat("dim_", value, "_", axis);
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return name;
}

// The symbols that are known at the node.
Symbols known_symbols(const Node& node) {
  Symbols known;
  for (const ir::Value* input : node.inputs) {
    if (input != nullptr) collect_symbols(input->type, known);
  }
  for (const auto& body : ir::bodies(node)) {
    known.insert(body->symbol_inputs.begin(), body->symbol_inputs.end());
  }
  return known;
}

const Graph& body_of(const Node& node, const char* name) {
  const auto found = node.attrs.find(name);
  const auto* body =
      found == node.attrs.end() ? nullptr : std::get_if<std::shared_ptr<Graph>>(&found->second);
  if (body == nullptr || *body == nullptr) {
    throw UserError(concat(node.op.str(), ": attribute '", name, "' is missing, want a graph"));
  }
  return **body;
}

void check_count(const Node& node, const std::string& what, size_t got, size_t want) {
  if (got == want) return;
  throw UserError(concat(node.op.str(), ": ", what, ": got ", got, ", want ", want));
}

void check_outputs(const Node& node) {
  const size_t count = node.outputs.size();
  if (!is_loop(node)) {
    for (const char* name : {"then_branch", "else_branch"}) {
      check_count(node, concat("outputs of ", name), body_of(node, name).outputs.size(), count);
    }
    return;
  }
  check_count(node, "outputs of body", body_of(node, "body").outputs.size(), count + 1);
  const size_t carried = num_carried(node);
  if (count < carried) check_count(node, "outputs", count, carried);
}

std::string output_name(const Node& node, size_t index) {
  const ir::Value* value = node.outputs[index];
  return value != nullptr ? value->name : concat(node.name, "_", index);
}

std::vector<Type> infer_if(const Node& node) {
  const Graph &then_branch = body_of(node, "then_branch"),
              &else_branch = body_of(node, "else_branch");
  const size_t count = node.outputs.size();
  check_outputs(node);
  const Symbols known = known_symbols(node);
  std::vector<Type> types;
  for (size_t i = 0; i < count; ++i) {
    types.push_back(common_type(node, output_name(node, i), then_branch.outputs[i]->type,
                                else_branch.outputs[i]->type, known));
  }
  return types;
}

// The type of a scan output: the values of all rounds, stacked along a new first dim.
Type scanned_type(const std::string& name, const Type& type, const Symbols& known) {
  Type all = with_shape(type, std::nullopt);
  if (!type.shape) return all;
  all.shape = ir::Shape{Dim::symbol(symbol_name(name, 0))};
  for (size_t i = 0; i < type.shape->size(); ++i) {
    Symbols symbols;
    collect((*type.shape)[i], symbols);
    const bool is_known = std::all_of(symbols.begin(), symbols.end(),
                                      [&](const auto& symbol) { return known.contains(symbol); });
    all.shape->push_back(is_known ? (*type.shape)[i] : Dim::symbol(symbol_name(name, i + 1)));
  }
  return all;
}

std::vector<Type> infer_loop(const Node& node) {
  const Graph& body = body_of(node, "body");
  const size_t carried = num_carried(node);
  check_outputs(node);
  const Symbols known = known_symbols(node);
  std::vector<Type> types;
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const Type& made = body.outputs[i + 1]->type;
    const std::string name = output_name(node, i);
    types.push_back(i < carried ? common_type(node, name, input(node, i + 2).type, made, known)
                                : scanned_type(name, made, known));
  }
  return types;
}

void lower_control_flow(const Node& node, CallList& calls) {
  ArgList args;
  for (ir::Value* value : node.inputs) args.emplace_back(value);
  calls.add(is_loop(node) ? "torch_ort::loop" : "torch_ort::if", "", std::move(args), node.outputs);
}

bool is_pure_inside(const Node& node) {
  for (const auto& body : ir::bodies(node)) {
    for (const Node& inner : body->nodes) {
      if (!inner.is_erased() && !is_pure(inner)) return false;
    }
  }
  return true;
}

Op control_flow(const char* name, int own_inputs, InferRule infer) {
  Op op;
  op.name = name;
  op.min_inputs = op.max_inputs = own_inputs;
  op.max_outputs = -1;
  op.since = 11;
  op.bfloat16_since = 16;
  op.infer = infer;
  op.pure_of = is_pure_inside;
  return op;
}

Op closed(Op op) {
  op.domain = ir::kTorchOrtDomain;
  op.max_inputs = -1;
  op.lower = lower_control_flow;
  return op;
}

}  // namespace

bool is_closed(const Node& node) {
  return ir::is(&node, "If", ir::kTorchOrtDomain) || ir::is(&node, "Loop", ir::kTorchOrtDomain);
}

bool is_control_flow(const Node& node) {
  return ir::is(&node, "If") || ir::is(&node, "Loop") || is_closed(node);
}

size_t num_carried(const Node& node) {
  if (!is_loop(node)) return 0;
  const size_t most = node.inputs.size() < 2 ? 0 : node.inputs.size() - 2;
  if (!is_closed(node)) return most;
  const int64_t carried = ir::int_attr(node.attrs, "carried", 0);
  if (carried < 0 || static_cast<size_t>(carried) > most) {
    throw UserError(concat(node.op.str(), ": carried: got ", carried, ", want 0 to ", most));
  }
  return static_cast<size_t>(carried);
}

void check_bodies(const Node& node) {
  if (node.inputs.size() < num_own_inputs(node)) {
    check_count(node, "inputs", node.inputs.size(), num_own_inputs(node));
  }
  check_outputs(node);
  const size_t given = node.inputs.size() - (is_loop(node) ? 0 : 1);
  for (const auto& body : ir::bodies(node)) {
    check_count(node, concat("inputs of ", body->name), body->inputs.size(), given);
  }
}

size_t num_own_inputs(const Node& node) { return is_loop(node) ? 2 + num_carried(node) : 1; }

void collect_symbols(const Type& type, Symbols& symbols) {
  if (type.shape) collect(*type.shape, symbols);
  if (type.strides) collect(*type.strides, symbols);
}

Symbols symbols_of(const Graph& graph) {
  Symbols symbols(graph.symbol_inputs.begin(), graph.symbol_inputs.end());
  for (const ir::Value& value : graph.values) collect_symbols(value.type, symbols);
  for (const Node& node : graph.nodes) symbols.merge(symbols_of(node));
  return symbols;
}

Symbols symbols_of(const Node& node) {
  Symbols symbols;
  for (const auto& [name, attr] : node.attrs) {
    if (auto* dim = std::get_if<Dim>(&attr)) collect(*dim, symbols);
    if (auto* shape = std::get_if<ir::Shape>(&attr)) collect(*shape, symbols);
  }
  for (const auto& body : ir::bodies(node)) symbols.merge(symbols_of(*body));
  for (const ir::Value* output : node.outputs) {
    if (output != nullptr) collect_symbols(output->type, symbols);
  }
  return symbols;
}

Type common_type(const Node& node, const std::string& name, const Type& a, const Type& b,
                 const Symbols& known) {
  const bool has_dtypes = a.dtype != ir::DType::kUndefined && b.dtype != ir::DType::kUndefined;
  if (has_dtypes && a.dtype != b.dtype) {
    throw UserError(concat(node.op.str(), ": '", name, "': got ", ir::name(a.dtype), " and ",
                           ir::name(b.dtype), ", want one dtype"));
  }
  Type type = with_shape(a.dtype != ir::DType::kUndefined ? a : b, std::nullopt);
  if (!a.shape || !b.shape || a.shape->size() != b.shape->size()) return type;
  type.shape = ir::Shape();
  for (size_t i = 0; i < a.shape->size(); ++i) {
    const Dim& dim = (*a.shape)[i];
    Symbols symbols;
    collect(dim, symbols);
    const bool is_same = dim == (*b.shape)[i] &&
                         std::all_of(symbols.begin(), symbols.end(),
                                     [&](const auto& symbol) { return known.contains(symbol); });
    type.shape->push_back(is_same ? dim : Dim::symbol(symbol_name(name, i)));
  }
  if (*type.shape == *a.shape && a.strides == b.strides) type.strides = a.strides;
  return type;
}

void register_control_flow(Registry& ops) {
  Op branch = control_flow("If", 1, infer_if), loop = control_flow("Loop", 2, infer_loop);
  branch.attributes = {{"then_branch", AttrKind::kGraph, true},
                       {"else_branch", AttrKind::kGraph, true}};
  loop.attributes = {{"body", AttrKind::kGraph, true}};
  loop.max_inputs = -1;
  ops.add(branch);
  ops.add(loop);
  ops.add(closed(branch));
  loop.attributes.push_back({"carried", AttrKind::kInt});
  ops.add(closed(loop));
}

}  // namespace torch_ort::ops
