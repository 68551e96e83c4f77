// The only ways to change a graph: they keep `uses` and `producer` right.
#pragma once

#include "ir/graph.h"

#include <list>
#include <string>
#include <vector>

namespace torch_ort::ir {

// Adds a value with a name that no other value has (`hint`, or `hint_1`, `hint_2`, ...).
Value& add_value(Graph& graph, std::string_view hint, Type type);
Value& add_input(Graph& graph, std::string_view name, Type type);
Value& add_initializer(Graph& graph, std::string_view name, Type type,
                       std::shared_ptr<const TensorData> data);
void add_output(Graph& graph, Value& value);

// Adds a node at the end, or before another one. It makes one new value per type in `types`;
// the first is named like the node. `hint` names the node.
Node& append(Graph& graph, OpId op, std::vector<Value*> inputs, const std::vector<Type>& types,
             Attrs attrs = {}, std::string_view hint = "");
// As above, for outputs that exist already and have no producer; nullptr leaves an output out.
// The node gets the name as it is.
Node& append_producer(Graph& graph, OpId op, std::vector<Value*> inputs,
                      std::vector<Value*> outputs, Attrs attrs, std::string_view name);
// As append(); takes `origin`, and the tags of recomputation, from `before`.
Node& insert_before(Graph& graph, Node& before, OpId op, std::vector<Value*> inputs,
                    const std::vector<Type>& types, Attrs attrs = {}, std::string_view hint = "");

// Reads `with` wherever `old` was read, graph outputs and subgraphs included. Where `old` was a
// graph output and `with` is the result of a node, `with` takes its name, by which callers know
// the output, and `old` gets one like it.
void replace_uses(Value& old, Value& with, Graph& graph);
// Grows the list of inputs if `index` is beyond its end.
void set_input(Node& node, int index, Value* value);
// Makes another value the output `index` of the graph.
void set_output(Graph& graph, int index, Value& value);
// Leaves a tombstone. InternalError if an output of the node still has a use.
void erase(Graph& graph, Node& node);
// InternalError if another value has that name.
void rename(Graph& graph, Value& value, std::string_view name);
// As rename(), but another value that has the name gets one like it.
void take_name(Graph& graph, Value& value, std::string_view name);
// Makes an initializer with data of a graph input, or of an initializer without.
void give_data(Graph& graph, Value& value, std::shared_ptr<const TensorData> data);
// The value of a body of `node` that stands for one of the graph which the node is in; made if
// there is none.
Value& capture(Node& node, Graph& body, Value& outer);
// Makes an input of a value of a body that stands for one of an outer graph.
void make_input(Graph& body, Value& captured);
// Renames values of bodies that are called like a value of a graph around them: ONNX knows no two
// values of one name there. Bodies of nodes of ours have names of their own.
void separate_names(Graph& graph);
// Frees tombstones, initializers with data that nothing reads, and values that nothing mentions any
// more; pointers to these become invalid. Nodes keep the outputs that nobody reads: how many there
// are has a meaning for many ops.
void sweep(Graph& graph);
// Moves `node` so that it stands just before `before`.
void move_before(Graph& graph, Node& node, Node& before);
// Brings the nodes into the given order, which lists each node of the graph but its tombstones.
void reorder(Graph& graph, const std::vector<Node*>& nodes);

// A deep copy, subgraphs included, without tombstones. Tensor data is shared.
std::unique_ptr<Graph> clone(const Graph& graph);

Value* find_value(Graph& graph, std::string_view name);  // nullptr if there is none
// Names of outer values that a graph refers to, those of its own subgraphs included.
std::vector<std::string> captured_names(const Graph& graph);

}  // namespace torch_ort::ir
