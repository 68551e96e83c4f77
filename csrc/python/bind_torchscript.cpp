// TorchScript for torch_ort/script: objects, and functions as programs.
#include "base/error.h"
#include "convert/torchscript.h"
#include "python/bind.h"
#include "python/script_object.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/python/python_ir.h>

#include <algorithm>

namespace torch_ort::python {

namespace {

namespace jit = torch::jit;

// A function of TorchScript. `owner` keeps it alive; for a method it is also the first argument.
struct ScriptFunction {
  jit::Function* function;
  py::object owner;
  bool is_method = false;

  static ScriptFunction of(const py::object& callable) {
    if (py::isinstance<jit::Method>(callable)) {
      auto& method = callable.cast<jit::Method&>();
      return {&method.function(), py::cast(ScriptObject(method.owner()._ivalue())), true};
    }
    ORT_CHECK(py::isinstance<jit::StrongFunctionPtr>(callable), "want a function of TorchScript");
    return {callable.cast<jit::StrongFunctionPtr&>().function_, callable};
  }
};

// The method or hook of an object that prim::CallMethod would call.
ScriptFunction method_of(const py::object& object, const std::string& name) {
  const auto type = object.cast<ScriptObject&>().object()->type();
  jit::Function* function = type->findMethod(name);
  if (!function) function = type->findHook(name);
  if (!function) {
    throw Unsupported(concat("TorchScript: ", type->str(), " has no method '", name, "'"));
  }
  return {function, object, true};
}

// ---- programs

py::tuple numbers(const std::vector<size_t>& values) { return py::tuple(py::cast(values)); }

// In a process with Python this is the only class that it can be. torch hides the symbols that
// dynamic_cast would need.
py::object python_call(const jit::Node& node) {
  const auto* call = static_cast<const jit::ConcretePythonOp*>(&node);
  const auto borrowed = [](const THPObjectPtr& value) {
    return py::reinterpret_borrow<py::object>(const_cast<PyObject*>(value.get()));
  };
  py::list scalars;
  for (const THPObjectPtr& scalar : call->scalar_args) scalars.append(borrowed(scalar));
  return py::make_tuple(borrowed(call->pyobj), call->cconv, py::tuple(scalars));
}

py::object field_names(const jit::Node& node) {
  const auto type = node.output()->type()->cast<c10::TupleType>();
  if (!type || !type->schema()) return py::none();
  py::list names;
  for (const c10::Argument& field : type->schema()->arguments()) names.append(field.name());
  return py::make_tuple(type->name() ? type->name()->name() : std::string("NamedTuple"),
                        py::tuple(names));
}

// Whether a value has a type. Symbols have the type of what they stand for, and a list has that of
// its elements.
bool is_a(const c10::TypePtr& type, py::handle value) {
  PyObject* object = value.ptr();
  const auto all_are = [](const c10::TypePtr& part, py::handle parts) {
    for (const py::handle item : py::iter(parts)) {
      if (!is_a(part, item)) return false;
    }
    return true;
  };
  switch (type->kind()) {
    case c10::TypeKind::AnyType: return true;
    case c10::TypeKind::NoneType: return value.is_none();
    case c10::TypeKind::TensorType: return THPVariable_Check(object);
    case c10::TypeKind::BoolType: return PyBool_Check(object) || torch::is_symbool(value);
    case c10::TypeKind::IntType:
      return (PyLong_Check(object) && !PyBool_Check(object)) || torch::is_symint(value);
    case c10::TypeKind::FloatType: return PyFloat_Check(object) || torch::is_symfloat(value);
    case c10::TypeKind::ComplexType: return PyComplex_Check(object);
    case c10::TypeKind::StringType: return PyUnicode_Check(object);
    case c10::TypeKind::AnyListType: return PyList_Check(object);
    case c10::TypeKind::AnyTupleType: return PyTuple_Check(object);
    case c10::TypeKind::ListType:
      return PyList_Check(object) &&
             all_are(type->expectRef<c10::ListType>().getElementType(), value);
    case c10::TypeKind::DictType: {
      if (!PyDict_Check(object)) return false;
      const auto& dict = type->expectRef<c10::DictType>();
      const auto given = py::reinterpret_borrow<py::dict>(value);
      return all_are(dict.getKeyType(), given) &&
             all_are(dict.getValueType(), given.attr("values")());
    }
    default: throw Unsupported(concat("TorchScript: isinstance of ", type->annotation_str()));
  }
}

py::object type_test(const jit::Node& node) {
  const std::vector<c10::TypePtr> types = node.tys(c10::attr::types);
  return py::cpp_function([types](const py::object& value) {
    return std::any_of(types.begin(), types.end(),
                       [&](const c10::TypePtr& type) { return is_a(type, value); });
  });
}

// Makes an object of a class that a script defines; its attributes are not set yet.
py::object maker_of(const jit::Node& node) {
  const auto type = node.output()->type()->expect<c10::ClassType>();
  return py::cpp_function([type] {
    return ScriptObject(c10::ivalue::Object::create(
        c10::StrongTypePtr(type->compilation_unit(), type), type->numAttributes()));
  });
}

// What a step needs besides values: a constant, something to call, or names of fields.
py::object extra_of(const convert::ScriptStep& step, const py::object& owner) {
  const jit::Node& node = *step.node;
  if (node.kind() == c10::prim::Constant) {
    jit::Function* function = convert::function_of(node);
    return function ? py::cast(ScriptFunction{function, owner}) : script_value(step.constant);
  }
  if (node.kind() == c10::prim::PythonOp) return python_call(node);
  if (node.kind() == c10::prim::TupleConstruct) return field_names(node);
  if (node.kind() == c10::prim::CreateObject) return maker_of(node);
  if (node.kind() == c10::prim::isinstance) return type_test(node);
  return py::none();
}

py::tuple block_of(const convert::ScriptBlock& block, const py::object& owner) {
  py::list steps;
  for (const convert::ScriptStep& step : block.steps) {
    py::list blocks;
    for (const convert::ScriptBlock& inner : step.blocks) blocks.append(block_of(inner, owner));
    steps.append(py::make_tuple(step.kind, step.overload, step.is_operator, step.name,
                                numbers(step.inputs), numbers(step.outputs), py::tuple(blocks),
                                extra_of(step, owner), step.file, step.line, step.text));
  }
  return py::make_tuple(numbers(block.inputs), steps, numbers(block.outputs));
}

py::tuple program_of(const ScriptFunction& code) {
  return block_of(convert::read_script(*code.function).body, code.owner);
}

// ---- arguments of a call from Python

bool is_symbolic(py::handle value) {
  return torch::is_symint(value) || torch::is_symfloat(value) || torch::is_symbool(value);
}

py::object argument(const c10::TypePtr& type, py::handle value, const std::string& where);

[[noreturn]] void refuse(const c10::TypePtr& type, py::handle value, const std::string& where) {
  throw Unsupported(concat("TorchScript: ", where, ": got a ", Py_TYPE(value.ptr())->tp_name,
                           ", want ", type->annotation_str()));
}

py::object symbolic(const c10::TypePtr& type, py::handle value, const std::string& where) {
  const bool is_int = torch::is_symint(value);
  switch (type->kind()) {
    case c10::TypeKind::AnyType:
    case c10::TypeKind::NumberType: break;
    case c10::TypeKind::IntType:
      if (!is_int) refuse(type, value, where);
      break;
    case c10::TypeKind::FloatType:
      if (is_int) return py::module_::import("torch").attr("sym_float")(value);
      if (!torch::is_symfloat(value)) refuse(type, value, where);
      break;
    case c10::TypeKind::BoolType:
      if (!torch::is_symbool(value)) refuse(type, value, where);
      break;
    default: refuse(type, value, where);
  }
  return py::reinterpret_borrow<py::object>(value);
}

py::object any_of(const c10::UnionType& type, py::handle value, const std::string& where) {
  for (const c10::TypePtr& contained : type.containedTypes()) {
    try {
      return argument(contained, value, where);
    } catch (const Unsupported&) {  // the next type may fit
    }
  }
  throw Unsupported(concat("TorchScript: ", where, ": got a ", Py_TYPE(value.ptr())->tp_name,
                           ", want ", type.annotation_str()));
}

py::object sequence(const c10::TypePtr& type, py::handle value, const std::string& where) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) refuse(type, value, where);
  const auto tuple = type->cast<c10::TupleType>();
  const auto parts = py::reinterpret_borrow<py::sequence>(value);
  if (tuple && parts.size() != tuple->elements().size()) refuse(type, value, where);
  py::list converted;
  for (size_t i = 0; i < parts.size(); ++i) {
    const c10::TypePtr part =
        tuple ? tuple->elements()[i] : type->expectRef<c10::ListType>().getElementType();
    converted.append(argument(part, py::object(parts[i]), concat(where, "[", i, "]")));
  }
  return tuple ? py::object(py::tuple(converted)) : py::object(converted);
}

// The argument as TorchScript converts it: containers are copied, and integers become floats where
// a float is expected.
py::object argument(const c10::TypePtr& type, py::handle value, const std::string& where) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      if (value.is_none()) return py::none();
      return argument(type->expectRef<c10::OptionalType>().getElementType(), value, where);
    case c10::TypeKind::UnionType: return any_of(type->expectRef<c10::UnionType>(), value, where);
    case c10::TypeKind::TensorType:
      if (!THPVariable_Check(value.ptr())) refuse(type, value, where);
      return py::reinterpret_borrow<py::object>(value);
    case c10::TypeKind::ListType:
    case c10::TypeKind::TupleType: return sequence(type, value, where);
    case c10::TypeKind::DictType: {
      if (!PyDict_Check(value.ptr())) refuse(type, value, where);
      const auto& dict = type->expectRef<c10::DictType>();
      py::dict converted;
      for (const auto& [key, part] : py::reinterpret_borrow<py::dict>(value)) {
        converted[argument(dict.getKeyType(), key, where)] =
            argument(dict.getValueType(), part, where);
      }
      return converted;
    }
    case c10::TypeKind::ClassType:
    case c10::TypeKind::InterfaceType: {
      if (!jit::as_module(value) && !jit::as_object(value)) refuse(type, value, where);
      return py::cast(ScriptObject::of(value));
    }
    case c10::TypeKind::AnyType: return py::reinterpret_borrow<py::object>(value);
    default: break;
  }
  if (is_symbolic(value)) return symbolic(type, value, where);
  if (THPVariable_Check(value.ptr())) {
    // A float that changes from call to call is a tensor in the graph.
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    const bool is_float =
        type->kind() == c10::TypeKind::FloatType && tensor.dim() == 0 && tensor.is_floating_point();
    if (!is_float) refuse(type, value, where);
    return py::reinterpret_borrow<py::object>(value);
  }
  try {
    return jit::toPyObject(jit::toIValue(value, type));
  } catch (const py::cast_error&) {
    refuse(type, value, where);
  }
}

// The values of all arguments, including defaults. Raises Unsupported where TorchScript would
// raise.
py::list bind(const ScriptFunction& code, const py::tuple& args, const py::dict& kwargs) {
  const c10::FunctionSchema& schema = code.function->getSchema();
  py::list values;
  if (code.is_method) values.append(code.owner);
  const size_t first = values.size();
  const auto& arguments = schema.arguments();
  if (first + args.size() > arguments.size()) {
    throw Unsupported(concat("TorchScript: ", schema.name(), "(): got ", args.size(),
                             " arguments, want at most ", arguments.size() - first));
  }
  size_t num_named = 0;
  for (size_t i = first; i < arguments.size(); ++i) {
    const c10::Argument& wanted = arguments[i];
    const std::string where = concat("argument '", wanted.name(), "' of ", schema.name(), "()");
    if (i - first < args.size()) {
      values.append(argument(wanted.type(), py::object(args[i - first]), where));
    } else if (kwargs.contains(wanted.name())) {
      values.append(argument(wanted.type(), py::object(kwargs[wanted.name().c_str()]), where));
      ++num_named;
    } else if (wanted.default_value()) {
      values.append(script_value(*wanted.default_value()));
    } else {
      throw Unsupported(concat("TorchScript: ", where, " is missing"));
    }
  }
  if (num_named != kwargs.size()) {
    throw Unsupported(concat("TorchScript: ", schema.name(), "(): arguments of unknown names"));
  }
  return values;
}

// The numbers by which TorchScript represents dtypes.
py::dict script_codes() {
  py::dict codes;
  for (int code = 0; code < static_cast<int>(c10::ScalarType::NumOptions); ++code) {
    const auto dtype = static_cast<c10::ScalarType>(code);
    if (dtype != c10::ScalarType::Undefined) codes[py::int_(code)] = py::cast(dtype);
  }
  return codes;
}

}  // namespace

void bind_torchscript(py::module_& module) {
  using namespace py::literals;
  module.def("script_codes", &script_codes,
             "The dtypes by the integers that scripts have for them.");
  py::class_<ScriptObject>(module, "ScriptObject",
                           "An object of TorchScript as a mapping of its attributes.")
      .def(py::init(&ScriptObject::of), "wrapper"_a)
      .def("__getitem__",
           [](const ScriptObject& self, const std::string& name) {
             const auto slot = self.slot(name);
             if (!slot) throw py::key_error(name);
             return self.at(*slot);
           })
      .def("__getitem__",
           [](const ScriptObject& self, const std::pair<std::string, size_t>& key) {
             const auto slot = self.slot(key.first);
             py::object part = slot ? self.part(*slot, key.second) : py::object();
             if (!part) throw py::key_error(key.first);
             return part;
           })
      .def("__setitem__", &ScriptObject::set)
      .def("__setitem__",
           [](ScriptObject& self, const std::pair<std::string, size_t>& key,
              const at::Tensor& value) { self.set_part(key.first, key.second, value); })
      .def(
          "list_keys",
          [](const ScriptObject& self) {
            py::list keys;
            for (const std::string& name : self.names()) {
              const size_t count = self.num_tensors(*self.slot(name));
              for (size_t i = 0; i < count; ++i) keys.append(py::make_tuple(name, i));
            }
            return keys;
          },
          "Where tensors hang in lists: name and index.")
      .def("__contains__", [](const ScriptObject& self,
                              const std::string& name) { return self.slot(name).has_value(); })
      .def("__iter__", [](const ScriptObject& self) { return py::iter(py::cast(self.names())); })
      .def("__len__", [](const ScriptObject& self) { return self.names().size(); })
      .def("keys", &ScriptObject::names)
      .def(
          "__eq__",
          [](const ScriptObject& self, const ScriptObject& other) {
            return self.object() == other.object();
          },
          py::is_operator())
      .def("__hash__",
           [](const ScriptObject& self) {
             return reinterpret_cast<std::uintptr_t>(self.object().get());
           })
      .def("type_name", [](const ScriptObject& self) { return self.object()->type()->str(); })
      .def("items",
           [](const py::object& self) {
             py::list items;
             for (const std::string& name : self.cast<ScriptObject&>().names()) {
               items.append(py::make_tuple(name, self[name.c_str()]));
             }
             return items;
           })
      .def("method", &method_of, "name"_a, "A method or hook of it. Raises Unsupported.")
      .def(
          "as_torch",
          [](const ScriptObject& self) { return jit::toPyObject(c10::IValue(self.object())); },
          "As torch's own Python type.");
  py::class_<ScriptFunction>(module, "ScriptFunction", "A function or method of TorchScript.")
      .def(py::init(&ScriptFunction::of), "callable"_a)
      .def_property_readonly("name",
                             [](const ScriptFunction& self) { return self.function->name(); })
      .def_property_readonly(
          "key",
          [](const ScriptFunction& self) {
            return reinterpret_cast<std::uintptr_t>(self.function);
          },
          "The same for the same code, as long as that lives.")
      .def("program", &program_of, "Its code: inputs, steps, outputs.")
      .def("bind", &bind, "args"_a, "kwargs"_a, "The values of all arguments of a call.");
}

}  // namespace torch_ort::python
