// Graphs as Python sees them: read, written, listed. The edit verbs are there for tests only.
#include "base/error.h"
#include "ir/edit.h"
#include "ir/onnx_proto.h"
#include "ir/verify.h"
#include "ops/file_check.h"
#include "ops/writer.h"
#include "python/bind.h"
#include "region/schedule.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// String attributes may contain any bytes.
py::str text_of(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape");
  if (!text) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

py::object to_python(const ir::Dim& dim) {
  return dim.is_constant() ? py::object(py::int_(dim.constant())) : py::object(py::str(dim.str()));
}

py::object to_python(double number) { return py::float_(number); }
py::object to_python(const std::string& text) { return text_of(text); }
py::object to_python(const std::shared_ptr<Graph>& graph) { return py::cast(graph); }

py::object to_python(const std::shared_ptr<const ir::TensorData>& data) {
  py::bytes bytes(reinterpret_cast<const char*>(data->bytes), data->num_bytes);
  return py::make_tuple(ir::name(data->dtype), data->shape, bytes);
}

template <typename Item>
py::object to_python(const std::vector<Item>& items) {
  py::list list;
  for (const Item& item : items) list.append(to_python(item));
  return list;
}

py::list names_of(const std::vector<Value*>& values) {
  py::list names;
  for (const Value* value : values) names.append(value ? value->name : "");
  return names;
}

py::list nodes_of(const Graph& graph) {
  py::list nodes;
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    py::dict attrs;
    for (const auto& [name, attr] : node.attrs) {
      attrs[py::str(name)] = std::visit([](const auto& value) { return to_python(value); }, attr);
    }
    py::dict fields;
    fields["op"] = node.op.name;
    fields["domain"] = node.op.domain;
    fields["name"] = node.name;
    fields["inputs"] = names_of(node.inputs);
    fields["outputs"] = names_of(node.outputs);
    fields["attrs"] = attrs;
    fields["origin"] = node.origin;
    fields["recompute"] = node.recompute;
    fields["checkpoint"] = node.checkpoint;
    fields["segment"] = node.segment;
    nodes.append(fields);
  }
  return nodes;
}

// name -> (dtype, shape, strides, device), with None for what is not known.
py::dict types_of(const Graph& graph) {
  py::dict types;
  for (const Value& value : graph.values) {
    const ir::Type& type = value.type;
    auto list_or_none = [](const std::optional<ir::Shape>& shape) -> py::object {
      return shape ? to_python(*shape) : py::none();
    };
    py::object dtype = py::none();
    if (type.dtype != ir::DType::kUndefined) dtype = py::str(ir::name(type.dtype));
    types[py::str(value.name)] = py::make_tuple(
        dtype, list_or_none(type.shape), list_or_none(type.strides), ir::to_string(type.device));
  }
  return types;
}

std::string write(const Graph& graph, int64_t opset) {
  py::gil_scoped_release release;
  return ir::to_onnx(graph, {.opset = opset != 0 ? opset : graph.opset}).model;
}

size_t count_nodes(const Graph& graph) {
  return std::count_if(graph.nodes.begin(), graph.nodes.end(),
                       [](const Node& node) { return !node.is_erased(); });
}

// --- for tests -----------------------------------------------------------------------------------

Node& node_named(Graph& graph, const std::string& name) {
  for (Node& node : graph.nodes) {
    if (!node.is_erased() && node.name == name) return node;
  }
  throw UserError(concat("testing: got node '", name, "', want one of the graph"));
}

Value& value_named(Graph& graph, const std::string& name) {
  Value* value = ir::find_value(graph, name);
  if (!value) throw UserError(concat("testing: got value '", name, "', want one of the graph"));
  return *value;
}

Value* optional_value(Graph& graph, const std::optional<std::string>& name) {
  return name ? &value_named(graph, *name) : nullptr;
}

std::vector<std::string> insert_before(Graph& graph, const std::string& before,
                                       const std::string& op,
                                       const std::vector<std::optional<std::string>>& inputs,
                                       const std::vector<std::string>& types_like,
                                       const std::string& domain, const std::string& hint) {
  std::vector<Value*> values;
  for (const auto& name : inputs) values.push_back(optional_value(graph, name));
  std::vector<ir::Type> types;
  for (const std::string& name : types_like) types.push_back(value_named(graph, name).type);
  Node& node =
      ir::insert_before(graph, node_named(graph, before), {domain, op}, values, types, {}, hint);
  std::vector<std::string> outputs;
  for (const Value* output : node.outputs) outputs.push_back(output->name);
  return outputs;
}

// An ops::Writer that takes values and nodes by name.
class NamedWriter {
 public:
  NamedWriter(Graph& graph, const std::optional<std::string>& before, const std::string& composite)
      : graph_(graph), writer_(graph, before ? &node_named(graph, *before) : nullptr, composite) {}

  std::string make(const std::string& op, const std::vector<std::string>& inputs) {
    return writer_.make(op, values(inputs))->name;
  }
  std::string make_ours(const std::string& op, const std::vector<std::string>& inputs,
                        const std::string& like) {
    return writer_.make_ours(op, values(inputs), value_named(graph_, like).type)->name;
  }
  std::string add_named(const std::string& name, const std::string& op,
                        const std::vector<std::string>& inputs) {
    return writer_.add_named(name, {"", op}, values(inputs), {ir::Type()}).outputs[0]->name;
  }
  std::string copy(const std::string& node, const std::vector<std::string>& inputs,
                   const std::string& like) {
    const ir::Type& type = value_named(graph_, like).type;
    return writer_.copy(node_named(graph_, node), values(inputs), {type}).name;
  }
  std::string again(const std::string& node, const std::vector<std::string>& inputs) {
    return writer_.again(node_named(graph_, node), values(inputs)).name;
  }
  std::string ints(const std::string& dims) { return writer_.ints(ir::parse_shape(dims))->name; }
  std::optional<std::string> scalar(double number, const std::string& dtype) {
    const Value* made = writer_.scalar(number, ir::dtype_from_name(dtype));
    return made == nullptr ? std::nullopt : std::optional(made->name);
  }
  std::string cast(const std::string& x, const std::string& dtype) {
    return writer_.cast(&value_named(graph_, x), ir::dtype_from_name(dtype))->name;
  }
  std::string reshape(const std::string& x, const std::string& shape) {
    return writer_.reshape(&value_named(graph_, x), ir::parse_shape(shape))->name;
  }
  std::string transpose(const std::string& x, const std::string& order) {
    return writer_.transpose(&value_named(graph_, x), ir::parse_shape(order))->name;
  }
  std::string reduce(const std::string& op, const std::string& x, const std::string& axes,
                     bool keeps_dims) {
    return writer_.reduce(op, &value_named(graph_, x), ir::parse_shape(axes), keeps_dims)->name;
  }

 private:
  std::vector<Value*> values(const std::vector<std::string>& names) {
    std::vector<Value*> found;
    for (const std::string& name : names) found.push_back(&value_named(graph_, name));
    return found;
  }

  Graph& graph_;
  ops::Writer writer_;
};

// Damages what the verifier checks, in one way. `name` is that of a value.
void corrupt(Graph& graph, const std::string& how, const std::string& name) {
  Value& value = value_named(graph, name);
  if (how == "same name") {
    value.name = graph.inputs.at(0)->name;
  } else if (how == "unknown name") {
    value.name += "_renamed";
  } else if (how == "lost use") {
    value.uses.pop_back();
  } else if (how == "extra use") {
    value.uses.push_back(value.uses.at(0));
  } else if (how == "no producer") {
    value.producer->outputs.clear();
    value.producer = nullptr;
  } else if (how == "wrong index") {
    value.index += 1;
  } else if (how == "producer") {
    value.producer = &graph.nodes.front();
  } else if (how == "input again") {
    graph.inputs.push_back(graph.inputs.at(0));
  } else if (how == "foreign value") {
    static Value foreign;
    graph.nodes.front().inputs.at(0) = &foreign;
  } else {
    throw UserError(concat("testing: got '", how, "', want a known way to break a graph"));
  }
}

ir::Attr attr_from(const py::handle& value) {
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::int_>(value)) return ir::Dim(value.cast<int64_t>());
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  return value.cast<std::vector<double>>();
}

py::object read_attr(Graph& graph, const std::string& node, const std::string& name,
                     const std::string& kind) {
  const ir::Attrs& attrs = node_named(graph, node).attrs;
  if (kind == "int") return py::int_(ir::int_attr(attrs, name, -1));
  if (kind == "dim") return to_python(ir::dim_attr(attrs, name, -1));
  if (kind == "float") return py::float_(ir::float_attr(attrs, name, -1));
  if (kind == "floats") return to_python(ir::floats_attr(attrs, name, {}));
  if (kind == "ints") return to_python(ir::ints_attr(attrs, name, {}));
  if (kind == "string") return to_python(ir::string_attr(attrs, name, ""));
  return to_python(ir::strings_attr(attrs, name, {}));
}

std::optional<int64_t> evaluate(const std::string& text,
                                const std::map<std::string, int64_t>& symbols) {
  return ir::Dim::parse(text).evaluate([&](const std::string& name) -> std::optional<int64_t> {
    auto found = symbols.find(name);
    return found == symbols.end() ? std::nullopt : std::optional(found->second);
  });
}

void bind_testing(py::module_& testing) {
  testing.def("node_names", [](const Graph& graph) {
    std::vector<std::string> names;
    for (const Node& node : graph.nodes) {
      if (!node.is_erased()) names.push_back(node.name);
    }
    return names;
  });
  testing.def("value_names", [](const Graph& graph) {
    std::vector<std::string> names;
    for (const Value& value : graph.values) names.push_back(value.name);
    return names;
  });
  testing.def("erase_node", [](Graph& graph, const std::string& node) {
    ir::erase(graph, node_named(graph, node));
  });
  testing.def("replace_uses", [](Graph& graph, const std::string& old, const std::string& with) {
    ir::replace_uses(value_named(graph, old), value_named(graph, with), graph);
  });
  testing.def("rename", [](Graph& graph, const std::string& value, const std::string& name) {
    ir::rename(graph, value_named(graph, value), name);
  });
  testing.def("sweep", &ir::sweep);
  testing.def("insert_before", &insert_before, py::arg("graph"), py::arg("before"), py::arg("op"),
              py::arg("inputs"), py::arg("types_like"), py::arg("domain") = "",
              py::arg("hint") = "");
  py::class_<NamedWriter>(testing, "Writer")
      .def(py::init<Graph&, const std::optional<std::string>&, const std::string&>(),
           py::arg("graph"), py::arg("before") = py::none(), py::arg("composite") = "",
           py::keep_alive<1, 2>())
      .def("make", &NamedWriter::make)
      .def("make_ours", &NamedWriter::make_ours, py::arg("op"), py::arg("inputs"), py::arg("like"))
      .def("add_named", &NamedWriter::add_named)
      .def("copy", &NamedWriter::copy, py::arg("node"), py::arg("inputs"), py::arg("like"))
      .def("again", &NamedWriter::again)
      .def("ints", &NamedWriter::ints)
      .def("scalar", &NamedWriter::scalar)
      .def("cast", &NamedWriter::cast)
      .def("reshape", &NamedWriter::reshape)
      .def("transpose", &NamedWriter::transpose)
      .def("reduce", &NamedWriter::reduce, py::arg("op"), py::arg("x"), py::arg("axes"),
           py::arg("keeps_dims"));
  testing.def("set_input", [](Graph& graph, const std::string& node, int index,
                              const std::optional<std::string>& value) {
    ir::set_input(node_named(graph, node), index, optional_value(graph, value));
  });
  testing.def("move_before", [](Graph& graph, const std::string& node, const std::string& before) {
    ir::move_before(graph, node_named(graph, node), node_named(graph, before));
  });
  testing.def("add_output", [](Graph& graph, const std::string& value) {
    ir::add_output(graph, value_named(graph, value));
  });
  testing.def("corrupt", &corrupt);
  testing.def("set_attr", [](Graph& graph, const std::string& node, const std::string& name,
                             const py::object& value) {
    node_named(graph, node).attrs[name] = attr_from(value);
  });
  testing.def("set_dim_attr", [](Graph& graph, const std::string& node, const std::string& name,
                                 const std::string& text) {
    node_named(graph, node).attrs[name] = ir::Dim::parse(text);
  });
  testing.def("set_shape_attr", [](Graph& graph, const std::string& node, const std::string& name,
                                   const std::string& text) {
    node_named(graph, node).attrs[name] = ir::parse_shape(text);
  });
  testing.def("read_attr", &read_attr);
  testing.def("add_parameter", [](Graph& graph, const std::string& name, const std::string& like) {
    ir::add_initializer(graph, name, value_named(graph, like).type, nullptr);
  });
  testing.def("dtype_sizes", [] {
    std::map<std::string, std::pair<int, int64_t>> sizes;
    for (int number = 1; number <= static_cast<int>(ir::DType::kFloat8E5M2FNUZ); ++number) {
      const auto dtype = static_cast<ir::DType>(number);
      if (dtype != ir::DType::kString) sizes[ir::name(dtype)] = {number, ir::size_bytes(dtype)};
    }
    return sizes;
  });
  testing.def("dtype_from_name",
              [](const std::string& name) { return static_cast<int>(ir::dtype_from_name(name)); });

  testing.def("dim_parse_str", [](const std::string& text) { return ir::Dim::parse(text).str(); });
  testing.def("dim_evaluate", &evaluate);
  testing.def("dim_equal", [](const std::string& a, const std::string& b) {
    return ir::Dim::parse(a) == ir::Dim::parse(b);
  });
  testing.def("dim_symbols", [](const std::string& text) {
    std::vector<std::string> names;
    ir::Dim::parse(text).collect_symbols(names);
    return names;
  });
  testing.def("shape_str",
              [](const std::string& text) { return ir::to_string(ir::parse_shape(text)); });
  testing.def("shape_numel",
              [](const std::string& text) { return ir::numel(ir::parse_shape(text)).str(); });
  testing.def("shape_strides", [](const std::string& text) {
    return ir::to_string(ir::contiguous_strides(ir::parse_shape(text)));
  });
}

}  // namespace

void bind_ir(py::module_& module) {
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def_static(
          "from_onnx",
          [](const py::bytes& bytes, const std::string& directory,
             const std::vector<std::string>& allow) {
            const std::string_view view(bytes);
            py::gil_scoped_release release;
            std::shared_ptr<Graph> graph = ir::from_onnx(view, directory);
            ops::check_file(*graph, allow);
            return graph;
          },
          py::arg("bytes"), py::arg("directory") = "",
          py::arg("allow") = std::vector<std::string>(),
          "Read a binary ONNX model; `directory` holds its external data. `allow`: what its nodes "
          "may run beside operators that only compute, by names of operators, of ops "
          "('com.microsoft.PythonOp') or of namespaces; '*' for everything.")
      .def(
          "to_onnx",
          [](const Graph& graph, int64_t opset) { return py::bytes(write(graph, opset)); },
          py::arg("opset") = 0,
          "Write a binary ONNX model; without `opset`, with the one that it was read with.")
      .def(
          "save",
          [](const Graph& graph, const std::string& path, int64_t opset, size_t external_limit) {
            ir::save_onnx(graph, path, opset, external_limit);
          },
          py::arg("path"), py::arg("opset"), py::arg("external_limit"),
          py::call_guard<py::gil_scoped_release>(),
          "Write a binary ONNX model into a file; more bytes of initializers than the limit go "
          "into `<path>.data`.")
      .def(
          "verify",
          [](const Graph& graph, const std::string& stage) {
            ir::verify(graph, stage);
            region::verify(graph, stage);
          },
          py::arg("stage") = "graph")
      .def("clone", [](const Graph& graph) { return std::shared_ptr<Graph>(ir::clone(graph)); })
      .def("nodes", &nodes_of)
      .def("types", &types_of)
      .def_readwrite("name", &Graph::name)
      .def_readonly("opset", &Graph::opset)
      .def_readonly("symbol_inputs", &Graph::symbol_inputs)
      .def_readwrite("size_hints", &Graph::size_hints)
      .def_property_readonly("num_nodes", &count_nodes)
      .def_property_readonly("input_names",
                             [](const Graph& graph) { return names_of(graph.inputs); })
      .def_property_readonly("output_names",
                             [](const Graph& graph) { return names_of(graph.outputs); })
      .def_property_readonly("initializer_names",
                             [](const Graph& graph) { return names_of(graph.initializers); });
  py::module_ testing = module.def_submodule("testing");
  bind_testing(testing);
}

}  // namespace torch_ort::python
