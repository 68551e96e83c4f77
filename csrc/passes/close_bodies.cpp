// If and Loop whose bodies refer to values of the graphs around them -> torch_ort.If and
// torch_ort.Loop, which take those values as inputs. A closed body is a graph like any other: all
// passes run on it, and a session of its own runs it.

#include "base/error.h"
#include "ir/edit.h"
#include "ops/control_flow.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// Enough for axes, shapes and single numbers.
constexpr size_t kFewBytes = 512;

// The data of a small constant; nullptr for other values. Each body gets a copy of it rather than
// an input, because nodes in the body may need it as sizes or axes when the graph is compiled.
std::shared_ptr<const ir::TensorData> small_data(const Value& value) {
  if (value.producer != nullptr && !ir::is(value.producer, "Constant")) return nullptr;
  auto data = ops::constant_data(value);
  return data != nullptr && data->num_bytes <= kFewBytes ? data : nullptr;
}

class Closer {
 public:
  Closer(Graph& graph, Node& node) : graph_(graph), node_(node), attrs_(node.attrs) {
    for (auto& [name, attr] : attrs_) {
      if (auto* body = std::get_if<std::shared_ptr<Graph>>(&attr)) {
        *body = ir::clone(**body);
        bodies_.push_back(body->get());
      }
    }
  }

  void run() {
    std::vector<Value*> inputs = node_.inputs;
    inputs.resize(std::max(inputs.size(), ops::num_own_inputs(node_)), nullptr);
    for (Value* outer : captured()) {
      if (!give_copy(*outer)) {
        inputs.push_back(outer);
        for (Graph* body : bodies_) give_input(*body, *outer);
      }
    }
    std::unordered_set<std::string> outside(graph_.symbol_inputs.begin(),
                                            graph_.symbol_inputs.end());
    for (const Value& value : graph_.values) ops::collect_symbols(value.type, outside);
    for (Graph* body : bodies_) {
      body->opset = graph_.opset;
      give_symbols(*body, outside);
    }
    if (node_.op.name == "Loop") attrs_["carried"] = ir::Dim(ops::num_carried(node_));
    replace(std::move(inputs));
  }

 private:
  // The values of this graph that bodies refer to by name, each once, in the order in which they
  // appear.
  std::vector<Value*> captured() {
    std::vector<Value*> values;
    for (const Graph* body : bodies_) {
      for (const std::string& name : ir::captured_names(*body)) {
        Value* outer = ir::find_value(graph_, name);
        ORT_CHECK(outer != nullptr, "a body of '", node_.name, "' names '", name,
                  "', which graph '", graph_.name, "' does not hold");
        if (std::find(values.begin(), values.end(), outer) == values.end()) values.push_back(outer);
      }
    }
    return values;
  }

  // Numbers with dims may be a weight, whose data changes: bodies get a copy if they read it as
  // numbers alone.
  bool may_be_weight(const Value& outer, const ir::TensorData& data) const {
    if (!ir::is_float(data.dtype) || data.shape.empty()) return false;
    return std::any_of(bodies_.begin(), bodies_.end(), [&](Graph* body) {
      const Value* inner = ir::find_value(*body, outer.name);
      return inner != nullptr && ops::is_read_as_tensor(*inner);
    });
  }

  bool give_copy(const Value& outer) {
    const auto data = small_data(outer);
    if (data == nullptr || may_be_weight(outer, *data)) return false;
    ir::Type type = outer.type;
    type.dtype = data->dtype;
    type.shape = ir::Shape(data->shape.begin(), data->shape.end());
    for (Graph* body : bodies_) {
      Value* inner = ir::find_value(*body, outer.name);
      if (inner == nullptr) continue;
      Value& copy = ir::add_initializer(*body, outer.name, type, data);
      ir::replace_uses(*inner, copy, *body);
    }
    return true;
  }

  static void give_input(Graph& body, const Value& outer) {
    const std::vector<std::string> named = ir::captured_names(body);
    const bool is_read = std::find(named.begin(), named.end(), outer.name) != named.end();
    // All bodies of a node have the same inputs, also those that they do not read.
    Value* inner =
        is_read ? ir::find_value(body, outer.name) : &ir::add_value(body, outer.name, {});
    inner->type = outer.type;
    ir::make_input(body, *inner);
  }

  // The symbols of the graph are passed to a body with each call, since the shapes of its inputs
  // may not determine all of them.
  static void give_symbols(Graph& body, const std::unordered_set<std::string>& outside) {
    std::vector<std::string> names;
    for (const std::string& name : ops::symbols_of(body)) {
      if (outside.contains(name)) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    body.symbol_inputs = std::move(names);
  }

  void replace(std::vector<Value*> inputs) {
    std::vector<ir::Type> types;
    for (const Value* output : node_.outputs) types.push_back(output ? output->type : ir::Type());
    Node& made = ops::Writer(graph_, &node_)
                     .add_named(node_.name, {ir::kTorchOrtDomain, node_.op.name}, std::move(inputs),
                                types, std::move(attrs_));
    for (size_t i = 0; i < node_.outputs.size(); ++i) {
      if (node_.outputs[i] != nullptr)
        ir::replace_uses(*node_.outputs[i], *made.outputs[i], graph_);
    }
    ir::erase(graph_, node_);
  }

  Graph& graph_;
  Node& node_;
  ir::Attrs attrs_;
  std::vector<Graph*> bodies_;
};

}  // namespace

int close_bodies(Graph& graph, PassContext& /*context*/) {
  int rewrites = 0;
  for (Node& node : graph.nodes) {
    if (node.is_erased() || !node.op.domain.empty() || !ops::is_control_flow(node)) continue;
    Closer(graph, node).run();
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
