// The reader, for torch_ort/read: programs are told in plain Python values.
#include "base/error.h"
#include "convert/reader.h"
#include "python/bind.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

ir::Dim dim_of(const py::handle& item) {
  if (py::isinstance<py::str>(item)) return ir::Dim::parse(item.cast<std::string>());
  return item.cast<int64_t>();
}

ir::Shape shape_of(const py::handle& items) {
  ir::Shape shape;
  for (const py::handle item : items) shape.push_back(dim_of(item));
  return shape;
}

// A type from (dtype name, shape, strides or None, device); None is an unknown type.
ir::Type type_of(const py::handle& item) {
  ir::Type type;
  if (item.is_none()) return type;
  const auto fields = item.cast<py::tuple>();
  type.dtype = ir::dtype_from_name(fields[0].cast<std::string>());
  type.shape = shape_of(fields[1]);
  if (!fields[2].is_none()) {
    type.strides = shape_of(fields[2]);
    if (*type.strides == ir::contiguous_strides(*type.shape)) type.strides.reset();
  }
  const auto device = fields[3].cast<std::string>();
  const size_t colon = device.find(':');
  type.device.kind = device.substr(0, colon);
  if (colon != std::string::npos) type.device.index = std::stoi(device.substr(colon + 1));
  return type;
}

// ("%", name) is a value, and ("#", text) an expression of sizes. Anything else is a plain value.
ops::Arg arg_of(convert::Reader& reader, const py::handle& item) {
  if (item.is_none()) return {};
  if (py::isinstance<py::bool_>(item)) return item.cast<bool>();
  if (py::isinstance<py::int_>(item)) return item.cast<int64_t>();
  if (py::isinstance<py::float_>(item)) return item.cast<double>();
  if (PyComplex_Check(item.ptr())) return item.cast<std::complex<double>>();
  if (py::isinstance<py::str>(item)) return item.cast<std::string>();
  if (py::isinstance<py::tuple>(item)) {
    const auto pair = item.cast<py::tuple>();
    const auto mark = pair[0].cast<std::string>();
    const auto text = pair[1].cast<std::string>();
    return mark == "%" ? ops::Arg(reader.value(text)) : ops::Arg(ir::Dim::parse(text));
  }
  if (py::isinstance<py::list>(item)) {
    ops::ArgList list;
    for (const py::handle element : item) list.push_back(arg_of(reader, element));
    return list;
  }
  throw Unsupported(concat("argument of type ", std::string(py::str(py::type::handle_of(item))),
                           ": a graph cannot hold it"));
}

void add_call(convert::Reader& reader, const std::string& op, const std::string& overload,
              const std::vector<std::string>& arg_names, const py::list& args,
              const std::vector<std::string>& names, const py::list& types, const std::string& name,
              const std::string& origin, const std::string& recompute, int checkpoint,
              const std::string& binds_symbol) {
  convert::AtenCall call;
  call.op = op;
  call.overload = overload;
  call.arg_names = arg_names;
  for (const py::handle item : args) call.args.push_back(arg_of(reader, item));
  for (const py::handle item : types) call.types.push_back(type_of(item));
  for (const std::string& result : names) call.used.push_back(!result.empty());
  call.used.resize(call.types.size(), false);
  call.name = name;
  call.origin = origin;
  call.recompute = recompute;
  call.checkpoint = checkpoint;
  call.binds_symbol = binds_symbol;
  reader.add_call(std::move(call), names);
}

void add_control_flow(convert::Reader& reader, const std::string& op, const py::list& inputs,
                      const std::vector<std::pair<std::string, convert::Reader*>>& bodies,
                      const std::vector<std::string>& names, const py::list& types,
                      const std::string& name, const std::string& origin) {
  convert::AtenCall call;
  call.op = op;
  for (const py::handle item : inputs) call.args.push_back(arg_of(reader, item));
  for (const py::handle item : types) call.types.push_back(type_of(item));
  call.name = name;
  call.origin = origin;
  reader.add_control_flow(call, names, bodies);
}

}  // namespace

void bind_convert(py::module_& module) {
  py::class_<convert::Reader>(module, "Reader")
      .def(py::init<std::string, int>(), py::arg("name"), py::arg("max_opset"))
      .def("add_input", [](convert::Reader& reader, const std::string& name,
                           const py::object& type) { reader.add_input(name, type_of(type)); })
      .def("add_constant", [](convert::Reader& reader, const std::string& name,
                              const py::object& type) { reader.add_constant(name, type_of(type)); })
      .def("add_symbol_input", &convert::Reader::add_symbol_input)
      .def("add_size_hint", &convert::Reader::add_size_hint)
      .def("add_call", &add_call, py::arg("op"), py::arg("overload"), py::arg("arg_names"),
           py::arg("args"), py::arg("names"), py::arg("types"), py::arg("name"), py::arg("origin"),
           py::arg("recompute"), py::arg("checkpoint"), py::arg("binds_symbol"))
      .def(
          "body",
          [](convert::Reader& reader, const std::string& name) {
            return std::make_unique<convert::Reader>(reader, name);
          },
          py::arg("name"), py::keep_alive<0, 1>(),
          "A reader of a body of If or Loop, which may name the values of this one.")
      .def("add_control_flow", &add_control_flow, py::arg("op"), py::arg("inputs"),
           py::arg("bodies"), py::arg("names"), py::arg("types"), py::arg("name"),
           py::arg("origin"))
      .def("add_yield",
           [](convert::Reader& reader, const std::vector<std::string>& outputs,
              const std::vector<std::pair<std::string, py::object>>& tangents) {
             std::vector<std::pair<std::string, ir::Type>> typed;
             for (const auto& [name, type] : tangents) typed.emplace_back(name, type_of(type));
             reader.add_yield(outputs, typed);
           })
      .def("add_alias", &convert::Reader::add_alias)
      .def("add_private_clone",
           [](convert::Reader& reader, const std::string& of, const std::string& name,
              const py::object& type) { reader.add_private_clone(of, name, type_of(type)); })
      .def("set_outputs", &convert::Reader::set_outputs)
      .def("take",
           [](convert::Reader& reader) { return std::shared_ptr<ir::Graph>(reader.take()); });
  module.def("converted_operators", [] { return convert::table().keys(); });
}

}  // namespace torch_ort::python
