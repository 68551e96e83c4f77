// The functions that change a graph. All changes go through them, since they keep `uses`,
// `producer` and the set of names consistent.
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

// append() adds a node at the end of the graph. It makes one new value for each type in `types`.
// `hint` names the node; its first output gets the same name.
Node& append(Graph& graph, OpId op, std::vector<Value*> inputs, const std::vector<Type>& types,
             Attrs attrs = {}, std::string_view hint = "");
// As append(), for outputs that exist already and have no producer; nullptr leaves an output out.
// The node gets `name` unchanged.
Node& append_producer(Graph& graph, OpId op, std::vector<Value*> inputs,
                      std::vector<Value*> outputs, Attrs attrs, std::string_view name);
// As append(), but adds the node just before `before`, and copies `origin` and the tags of
// recomputation from it.
Node& insert_before(Graph& graph, Node& before, OpId op, std::vector<Value*> inputs,
                    const std::vector<Type>& types, Attrs attrs = {}, std::string_view hint = "");

// Makes every reader of `old` read `with` instead, graph outputs and subgraphs included. If `old`
// is a graph output and `with` is the result of a node, `with` also takes the name of `old`, since
// callers know outputs by their names; `old` then gets a similar name.
void replace_uses(Value& old, Value& with, Graph& graph);
// Makes `value` the input `index` of the node. The list of inputs grows if it is too short.
void set_input(Node& node, int index, Value* value);
// Makes another value the output `index` of the graph.
void set_output(Graph& graph, int index, Value& value);
// Marks the node as erased; sweep() frees it. Throws InternalError if an output of the node still
// has a use.
void erase(Graph& graph, Node& node);
// Throws InternalError if another value has that name.
void rename(Graph& graph, Value& value, std::string_view name);
// As rename(), but if another value has the name, that value gets a similar one.
void take_name(Graph& graph, Value& value, std::string_view name);
// Turns a graph input, or an initializer without data, into an initializer with data.
void give_data(Graph& graph, Value& value, std::shared_ptr<const TensorData> data);
// Returns the value in `body`, a subgraph of `node`, that refers to the value `outer` of the graph
// around it. Adds one if there is none.
Value& capture(Node& node, Graph& body, Value& outer);
// Turns a value of a body that refers to an outer value into an input of the body.
void make_input(Graph& body, Value& captured);
// Renames the values of subgraphs that have the name of a value in a graph around them, which ONNX
// forbids. Closed bodies, whose names are their own, are left alone.
void separate_names(Graph& graph);
// Frees erased nodes, initializers with data that nothing reads, and values that nothing refers to.
// Pointers to these become invalid. Nodes keep their unread outputs, since for many ops the number
// of outputs has a meaning.
void sweep(Graph& graph);
// Moves `node` so that it stands just before `before`.
void move_before(Graph& graph, Node& node, Node& before);
// Puts the nodes into the given order, which has to list every node of the graph that is not
// erased.
void reorder(Graph& graph, const std::vector<Node*>& nodes);

// Returns a deep copy, subgraphs included, without erased nodes. Tensor data is shared.
std::unique_ptr<Graph> clone(const Graph& graph);

Value* find_value(Graph& graph, std::string_view name);  // nullptr if there is none
// Returns the names of the outer values that the graph and its subgraphs refer to.
std::vector<std::string> captured_names(const Graph& graph);

}  // namespace torch_ort::ir
