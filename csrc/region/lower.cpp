#include "region/lower.h"

#include "ir/edit.h"
#include "ops/control_flow.h"
#include "ops/fusion.h"
#include "ops/writer.h"
#include "region/contract.h"
#include "region/rounded.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <unordered_set>

namespace torch_ort::region {

namespace {

using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Value;

bool is_draw(const Node& node) { return ir::is(&node, "PhiloxMask", ir::kTorchOrtDomain); }

// Replaces a PhiloxMask by a region of this node alone.
void draw_alone(Graph& graph, const RegionSpec& spec, Node& mask) {
  auto body = std::make_shared<Graph>();
  body->name = graph.name + "_" + mask.name;
  const Value& seed = *mask.inputs.at(0);
  Value& inner = ir::add_input(*body, "seed", seed.type);
  const Node& drawn =
      ops::Writer(*body, nullptr).add(mask.op, {&inner}, {mask.outputs.at(0)->type}, mask.attrs);
  ir::add_output(*body, *drawn.outputs[0]);
  ir::Attrs attrs;
  write({std::move(body), spec.rows, spec.columns, {Space::kScalar}}, attrs);
  const Node& alone = ops::Writer(graph, &mask)
                          .add_named(mask.name, {ir::kTorchOrtDomain, "Region"}, {mask.inputs[0]},
                                     {mask.outputs[0]->type}, std::move(attrs));
  ir::replace_uses(*mask.outputs[0], *alone.outputs[0], graph);
  ir::erase(graph, mask);
}

using Names = std::unordered_set<std::string>;

class Widener {
 public:
  // `rounded`: the names of values that keep the precision of their dtype.
  Widener(Graph& graph, DType precision, Names rounded)
      : graph_(graph), precision_(precision), rounded_(std::move(rounded)) {}

  void run() {
    Node& first = graph_.nodes.front();
    for (auto node = graph_.nodes.begin(); node != graph_.nodes.end();) {
      const auto next = std::next(node);
      if (!node->is_erased()) widen(*node, next == graph_.nodes.end() ? nullptr : &*next);
      node = next;
    }
    for (Value* value : graph_.inputs) convert(*value, first);
    // Constants stay constants: the Cast of one would be on the host, whatever the device.
    const std::vector<Value*> initializers = graph_.initializers;
    for (Value* value : initializers) convert(*value, first);
  }

 private:
  bool is_narrow(DType dtype) const {
    return ir::is_float(dtype) && ir::size_bytes(dtype) < ir::size_bytes(precision_);
  }

  // `next`: the node after this one; nullptr if it is the last one.
  void widen(Node& node, Node* next) const {
    for (Value* value : node.outputs) {
      if (value == nullptr || !is_narrow(value->type.dtype)) continue;
      const DType dtype = value->type.dtype;
      value->type.dtype = precision_;
      if (rounded_.contains(value->name)) round(*value, dtype, next);
    }
    if (ir::is(&node, "Cast") && node.outputs.at(0)->type.dtype == precision_) {
      node.attrs["to"] = ir::Dim(static_cast<int64_t>(precision_));
    }
  }

  // Makes all readers of a result read it rounded to a shorter dtype.
  void round(Value& value, DType dtype, Node* next) const {
    ops::Writer write(graph_, next);
    Value* narrow = write.cast(&value, dtype);
    Value* rounded = write.cast(narrow, precision_);
    ir::replace_uses(value, *rounded, graph_);
    ir::set_input(*narrow->producer, 0, &value);
  }

  // Makes all readers of an input or initializer read it in the wider dtype.
  void convert(Value& value, Node& first) {
    if (!is_narrow(value.type.dtype)) return;
    const std::vector<ir::Use> uses = value.uses;
    ops::Writer write(graph_, &first);
    const std::optional<double> number = ops::known_double(&value);
    Value* wide = number && value.type.shape->empty() ? write.scalar(*number, precision_)
                                                      : write.cast(&value, precision_);
    for (const ir::Use& use : uses) {
      if (use.node != nullptr) {
        ir::set_input(*use.node, use.index, wide);
      } else {
        ir::set_output(graph_, use.index, *wide);
      }
    }
  }

  Graph& graph_;
  const DType precision_;
  const Names rounded_;
};

Names names_of_rounded(const RegionSpec& spec) {
  Names names;
  for (const Value* value : rounded_values(members_of(spec))) names.insert(value->name);
  return names;
}

}  // namespace

bool is_mask(const Node& region) {
  const Graph& body = *read(region).body;
  return body.nodes.size() == 1 && is_draw(body.nodes.front());
}

std::unique_ptr<Graph> lower(const Node& region, DType precision) {
  const RegionSpec spec = read(region);
  std::unique_ptr<Graph> graph = ir::clone(*spec.body);
  for (Node& node : graph->nodes) {
    if (is_draw(node)) draw_alone(*graph, spec, node);
  }
  ir::sweep(*graph);
  if (precision != DType::kUndefined) Widener(*graph, precision, names_of_rounded(spec)).run();
  const auto symbols = ops::symbols_of(*graph);
  graph->symbol_inputs.assign(symbols.begin(), symbols.end());
  std::sort(graph->symbol_inputs.begin(), graph->symbol_inputs.end());
  return graph;
}

}  // namespace torch_ort::region
