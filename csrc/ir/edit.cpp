#include "ir/edit.h"

#include "base/error.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torch_ort::ir {

namespace {

std::string unused_name(Graph& graph, std::string_view hint) {
  std::string name(hint);
  if (!graph.names.contains(name) && !graph.last_suffixes.contains(name)) return name;
  int& suffix = graph.last_suffixes[name];
  std::string candidate;
  do {
    candidate = concat(hint, "_", ++suffix);
  } while (graph.names.contains(candidate));
  return candidate;
}

void remove_use(Value& value, Use use) {
  auto found = std::find(value.uses.begin(), value.uses.end(), use);
  ORT_CHECK(found != value.uses.end(), "edit: value '", value.name, "' has no use ", use.index,
            " of node '", use.node ? use.node->name : "", "'");
  value.uses.erase(found);
}

bool is_captured(const Graph& graph, const Value& value) {
  auto holds = [&](const std::vector<Value*>& list) {
    return std::find(list.begin(), list.end(), &value) != list.end();
  };
  return !value.producer && !holds(graph.inputs) && !holds(graph.initializers);
}

// The names of outer values that the subgraphs of a node refer to, each once.
std::vector<std::string> captured_by(Node& node) {
  std::vector<std::string> names;
  for (const auto& body : bodies(node)) {
    for (std::string& name : captured_names(*body)) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(std::move(name));
      }
    }
  }
  return names;
}

// Records the uses of a new node, including those by its subgraphs.
void attach(Graph& graph, Node& node) {
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (node.inputs[i]) node.inputs[i]->uses.push_back({&node, static_cast<int>(i)});
  }
  for (const std::string& name : captured_by(node)) {
    Value* value = find_value(graph, name);
    // In a subgraph the name may be that of a value of an outer graph.
    if (!value) value = &add_value(graph, name, {});
    value->uses.push_back({&node, kCaptured});
  }
}

// Makes the subgraphs of a node refer to another outer value.
void rename_captured(Node& node, const std::string& old_name, const std::string& new_name) {
  for (const auto& body : bodies(node)) {
    Value* old = find_value(*body, old_name);
    if (!old || !is_captured(*body, *old)) continue;
    Value* existing = find_value(*body, new_name);
    ORT_CHECK(!existing || is_captured(*body, *existing), "edit: subgraph '", body->name,
              "' has a value '", new_name, "' of its own, so it cannot refer to an outer one");
    if (existing) {
      replace_uses(*old, *existing, *body);
    } else {
      rename(*body, *old, new_name);
    }
  }
}

Node& add_node(Graph& graph, std::list<Node>::iterator before, OpId op, std::vector<Value*> inputs,
               Attrs attrs, std::string name) {
  auto position = graph.nodes.emplace(before);
  Node& node = *position;
  node.position = position;
  node.name = std::move(name);
  node.op = std::move(op);
  node.inputs = std::move(inputs);
  node.attrs = std::move(attrs);
  attach(graph, node);
  return node;
}

void add_output_slot(Node& node, Value* value) {
  if (value) {
    value->producer = &node;
    value->index = static_cast<int>(node.outputs.size());
  }
  node.outputs.push_back(value);
}

Node& add_node_and_values(Graph& graph, std::list<Node>::iterator before, OpId op,
                          std::vector<Value*> inputs, const std::vector<Type>& types, Attrs attrs,
                          std::string_view hint) {
  std::string name = unused_name(graph, hint.empty() ? op.name : hint);
  Node& node = add_node(graph, before, std::move(op), std::move(inputs), std::move(attrs), name);
  for (const Type& type : types) add_output_slot(node, &add_value(graph, name, type));
  return node;
}

// Makes one reader read another value.
void redirect(Graph& graph, Use use, const Value& old, Value& with) {
  if (!use.node) {
    graph.outputs.at(use.index) = &with;
  } else if (use.index != kCaptured) {
    use.node->inputs.at(use.index) = &with;
  } else {
    rename_captured(*use.node, old.name, with.name);
    // A node captures a value only once.
    if (std::find(with.uses.begin(), with.uses.end(), use) != with.uses.end()) return;
  }
  with.uses.push_back(use);
}

// Gives the name of `from` to `to`. `from` gets a similar one.
void give_name(Graph& graph, Value& from, Value& to) {
  const std::string name = from.name;
  // No later node may get the name that its node keeps.
  if (to.producer != nullptr && to.producer->name == to.name) {
    graph.last_suffixes.try_emplace(to.name);
  }
  rename(graph, from, unused_name(graph, name));
  rename(graph, to, name);
}

bool is_output(const Value& value) {
  return std::any_of(value.uses.begin(), value.uses.end(),
                     [](const Use& use) { return use.node == nullptr; });
}

void renumber(std::vector<Value*>& values) {
  for (size_t i = 0; i < values.size(); ++i) values[i]->index = static_cast<int>(i);
}

void separate_names(Graph& graph, std::vector<const Graph*>& around) {
  const auto is_taken = [&](const std::string& name) {
    return std::any_of(around.begin(), around.end(),
                       [&](const Graph* outer) { return outer->names.contains(name); });
  };
  for (Value& value : graph.values) {
    if (!is_taken(value.name) || is_captured(graph, value)) continue;
    std::string name;
    do {
      name = unused_name(graph, value.name);
      if (is_taken(name)) name += "_in";
    } while (is_taken(name) || graph.names.contains(name));
    rename(graph, value, name);
  }
  around.push_back(&graph);
  for (Node& node : graph.nodes) {
    if (node.op.domain == kTorchOrtDomain) continue;
    for (const auto& body : bodies(node)) separate_names(*body, around);
  }
  around.pop_back();
}

}  // namespace

Value& add_value(Graph& graph, std::string_view hint, Type type) {
  Value& value = graph.values.emplace_back();
  value.name = unused_name(graph, hint);
  value.type = std::move(type);
  graph.names.insert(value.name);
  return value;
}

Value& add_input(Graph& graph, std::string_view name, Type type) {
  Value& value = add_value(graph, name, std::move(type));
  value.index = static_cast<int>(graph.inputs.size());
  graph.inputs.push_back(&value);
  return value;
}

Value& add_initializer(Graph& graph, std::string_view name, Type type,
                       std::shared_ptr<const TensorData> data) {
  Value& value = add_value(graph, name, std::move(type));
  value.index = static_cast<int>(graph.initializers.size());
  value.data = std::move(data);
  graph.initializers.push_back(&value);
  return value;
}

void add_output(Graph& graph, Value& value) {
  value.uses.push_back({nullptr, static_cast<int>(graph.outputs.size())});
  graph.outputs.push_back(&value);
}

Node& append(Graph& graph, OpId op, std::vector<Value*> inputs, const std::vector<Type>& types,
             Attrs attrs, std::string_view hint) {
  return add_node_and_values(graph, graph.nodes.end(), std::move(op), std::move(inputs), types,
                             std::move(attrs), hint);
}

Node& append_producer(Graph& graph, OpId op, std::vector<Value*> inputs,
                      std::vector<Value*> outputs, Attrs attrs, std::string_view name) {
  Node& node = add_node(graph, graph.nodes.end(), std::move(op), std::move(inputs),
                        std::move(attrs), std::string(name));
  for (Value* output : outputs) {
    ORT_CHECK(!output || !output->producer, "edit: value '", output ? output->name : "",
              "' has a producer already");
    add_output_slot(node, output);
  }
  return node;
}

Node& insert_before(Graph& graph, Node& before, OpId op, std::vector<Value*> inputs,
                    const std::vector<Type>& types, Attrs attrs, std::string_view hint) {
  Node& node = add_node_and_values(graph, before.position, std::move(op), std::move(inputs), types,
                                   std::move(attrs), hint);
  node.origin = before.origin;
  node.recompute = before.recompute;
  node.checkpoint = before.checkpoint;
  node.segment = before.segment;
  node.captured = before.captured;
  return node;
}

void replace_uses(Value& old, Value& with, Graph& graph) {
  if (&old == &with) return;
  const bool keeps_name = is_output(old) && with.producer && !is_output(with);
  for (const Use& use : std::exchange(old.uses, {})) redirect(graph, use, old, with);
  if (keeps_name) give_name(graph, old, with);
}

void set_input(Node& node, int index, Value* value) {
  ORT_CHECK(index >= 0, "edit: input of node '", node.name, "': got slot ", index,
            ", want one from 0 up");
  if (index >= static_cast<int>(node.inputs.size())) node.inputs.resize(index + 1, nullptr);
  Value*& slot = node.inputs[index];
  if (slot) remove_use(*slot, {&node, index});
  slot = value;
  if (slot) slot->uses.push_back({&node, index});
}

void set_output(Graph& graph, int index, Value& value) {
  Value*& slot = graph.outputs.at(index);
  remove_use(*slot, {nullptr, index});
  slot = &value;
  value.uses.push_back({nullptr, index});
}

void erase(Graph& graph, Node& node) {
  for (const Value* output : node.outputs) {
    ORT_CHECK(!output || output->uses.empty(), "edit: erase of node '", node.name,
              "': its output '", output->name, "' has ", output->uses.size(), " uses, want none");
  }
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (node.inputs[i]) remove_use(*node.inputs[i], {&node, static_cast<int>(i)});
  }
  for (const std::string& name : captured_by(node)) {
    remove_use(*find_value(graph, name), {&node, kCaptured});
  }
  for (Value* output : node.outputs) {
    if (output) output->producer = nullptr;
  }
  auto position = node.position;
  node = Node();
  node.position = position;
}

void rename(Graph& graph, Value& value, std::string_view name) {
  if (value.name == name) return;
  std::string new_name(name);
  ORT_CHECK(!graph.names.contains(new_name), "edit: rename of value '", value.name,
            "': another value has the name '", name, "'");
  for (const Use& use : value.uses) {
    if (use.index == kCaptured) rename_captured(*use.node, value.name, new_name);
  }
  graph.names.erase(value.name);
  value.name = std::move(new_name);
  graph.names.insert(value.name);
}

void take_name(Graph& graph, Value& value, std::string_view name) {
  if (value.name == name) return;
  if (Value* other = find_value(graph, name)) {
    give_name(graph, *other, value);
  } else {
    rename(graph, value, name);
  }
}

Value& capture(Node& node, Graph& body, Value& outer) {
  Value* known = find_value(body, outer.name);
  ORT_CHECK(!known || is_captured(body, *known), "edit: graph '", body.name, "' has a value '",
            outer.name, "' of its own, so it cannot refer to an outer one");
  const Use use{&node, kCaptured};
  if (std::find(outer.uses.begin(), outer.uses.end(), use) == outer.uses.end()) {
    outer.uses.push_back(use);
  }
  return known ? *known : add_value(body, outer.name, outer.type);
}

void make_input(Graph& body, Value& captured) {
  ORT_CHECK(is_captured(body, captured), "edit: value '", captured.name, "' of graph '", body.name,
            "' becomes an input: want one of an outer graph");
  captured.index = static_cast<int>(body.inputs.size());
  body.inputs.push_back(&captured);
}

void give_data(Graph& graph, Value& value, std::shared_ptr<const TensorData> data) {
  ORT_CHECK(!value.producer && !value.data, "edit: value '", value.name,
            "' gets data: want an input, or an initializer without");
  if (std::erase(graph.inputs, &value) > 0) {
    renumber(graph.inputs);
    value.index = static_cast<int>(graph.initializers.size());
    graph.initializers.push_back(&value);
  }
  value.type.strides.reset();
  value.data = std::move(data);
}

void separate_names(Graph& graph) {
  std::vector<const Graph*> around;
  separate_names(graph, around);
}

void sweep(Graph& graph) {
  std::erase_if(graph.nodes, [](const Node& node) { return node.is_erased(); });
  std::erase_if(graph.initializers,
                [](const Value* value) { return value->data && value->uses.empty(); });
  renumber(graph.initializers);

  std::unordered_set<const Value*> mentioned(graph.inputs.begin(), graph.inputs.end());
  mentioned.insert(graph.initializers.begin(), graph.initializers.end());
  std::erase_if(graph.values, [&](const Value& value) {
    if (value.producer || !value.uses.empty() || mentioned.contains(&value)) return false;
    graph.names.erase(value.name);
    return true;
  });
}

void move_before(Graph& graph, Node& node, Node& before) {
  graph.nodes.splice(before.position, graph.nodes, node.position);
}

void reorder(Graph& graph, const std::vector<Node*>& nodes) {
  for (Node* node : nodes) graph.nodes.splice(graph.nodes.end(), graph.nodes, node->position);
}

std::unique_ptr<Graph> clone(const Graph& graph) {
  auto copy = std::make_unique<Graph>();
  copy->name = graph.name;
  copy->symbol_inputs = graph.symbol_inputs;
  copy->size_hints = graph.size_hints;
  copy->opset = graph.opset;
  copy->last_suffixes = graph.last_suffixes;

  std::unordered_map<const Value*, Value*> values = {{nullptr, nullptr}};
  for (const Value& value : graph.values) {
    Value& twin = copy->values.emplace_back(value);
    copy->names.insert(twin.name);
    values[&value] = &twin;
  }
  auto twins_of = [&](const std::vector<Value*>& list) {
    std::vector<Value*> twins;
    for (const Value* value : list) twins.push_back(values.at(value));
    return twins;
  };
  copy->inputs = twins_of(graph.inputs);
  copy->outputs = twins_of(graph.outputs);
  copy->initializers = twins_of(graph.initializers);

  std::unordered_map<const Node*, Node*> nodes = {{nullptr, nullptr}};
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    Node& twin = copy->nodes.emplace_back(node);
    twin.position = std::prev(copy->nodes.end());
    twin.inputs = twins_of(node.inputs);
    twin.outputs = twins_of(node.outputs);
    for (auto& [name, attr] : twin.attrs) {
      if (auto* subgraph = std::get_if<std::shared_ptr<Graph>>(&attr))
        *subgraph = clone(**subgraph);
    }
    nodes[&node] = &twin;
  }
  for (Value& value : copy->values) {
    value.producer = nodes.at(value.producer);
    for (Use& use : value.uses) use.node = nodes.at(use.node);
  }
  return copy;
}

Value* find_value(Graph& graph, std::string_view name) {
  if (!graph.names.contains(std::string(name))) return nullptr;
  for (Value& value : graph.values) {
    if (value.name == name) return &value;
  }
  return nullptr;
}

std::vector<std::string> captured_names(const Graph& graph) {
  std::vector<std::string> names;
  for (const Value& value : graph.values) {
    // A value without uses was left behind by an edit.
    if (!value.uses.empty() && is_captured(graph, value)) names.push_back(value.name);
  }
  return names;
}

}  // namespace torch_ort::ir
