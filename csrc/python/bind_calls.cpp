// A graph as the calls of PyTorch's operators that compute it, for Python to write as a module.
#include "base/error.h"
#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/control_flow.h"
#include "ops/function.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/pass.h"
#include "python/bind.h"
#include "python/plain.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

py::dict program_of(const ir::Graph& graph, const ops::CallList& list);

// Those of the bodies of a closed node, by the names of its attributes.
py::dict programs_of_bodies(const ir::Node& node) {
  py::dict programs;
  for (const auto& [name, attr] : node.attrs) {
    const auto* body = std::get_if<std::shared_ptr<ir::Graph>>(&attr);
    if (body == nullptr) continue;
    size_t yield = 0;
    programs[py::str(name)] = program_of(**body, ops::lower(**body, yield));
  }
  return programs;
}

// Numbers the values of a graph and of its calls.
class Listing {
 public:
  explicit Listing(const ops::CallList& list) {
    for (const ops::Call& call : list.calls) {
      check_is_safe(call);
      py::list outputs;
      for (const ir::Value* value : call.outputs) outputs.append(reference(value));
      calls_.append(py::make_tuple(call.op, call.overload, argument(call.args), outputs,
                                   call.node->op.str(), call.node->name, attributes(*call.node),
                                   programs_of_bodies(*call.node)));
    }
  }

  const py::list& calls() const { return calls_; }

  // (number, name) of values of the graph.
  py::list named(const std::vector<ir::Value*>& values) {
    py::list all;
    for (const ir::Value* value : values) all.append(py::make_tuple(number(value), value->name));
    return all;
  }

  // Of all values that calls read or write and that stand for data: (number, dtype, sizes, bytes).
  py::list constants() const {
    py::list all;
    for (const auto& [value, number] : numbers_) {
      if (!value->data) continue;
      const ir::TensorData& data = *value->data;
      all.append(
          py::make_tuple(number, ir::name(data.dtype), data.shape,
                         py::bytes(reinterpret_cast<const char*>(data.bytes), data.num_bytes)));
    }
    return all;
  }

  // Names of values of the graph, by number; values between the calls of a node have none.
  py::dict names() const {
    py::dict all;
    for (const auto& [value, number] : numbers_) {
      if (!value->name.empty()) all[py::int_(number)] = value->name;
    }
    return all;
  }

  // Dims of values that have symbols, by number.
  py::dict dims() const {
    py::dict all;
    for (const auto& [value, number] : numbers_) {
      if (value->type.shape && !ir::is_constant(*value->type.shape)) {
        all[py::int_(number)] = to_plain(*value->type.shape);
      }
    }
    return all;
  }

 private:
  // A kernel that accesses memory by arguments which it does not check is no call for a module: its
  // sizes may be others than those of the file. Group norm has a form that checks them.
  static void check_is_safe(const ops::Call& call) {
    if (ops::registry().operator_row(call.op).check == nullptr ||
        call.op == ops::aten::kGroupNorm) {
      return;
    }
    throw Unsupported(concat(call.op, ": want an operator that checks its arguments (node '",
                             call.node->name, "')"));
  }

  // Those that Python reads: of a function, and how many variables a loop carries.
  static py::dict attributes(const ir::Node& node) {
    if (ops::is_function(node.op)) return to_plain(node.attrs);
    py::dict known;
    if (ops::is_closed(node)) known["carried"] = ops::num_carried(node);
    return known;
  }

  int number(const ir::Value* value) {
    return numbers_.try_emplace(value, static_cast<int>(numbers_.size())).first->second;
  }
  py::object reference(const ir::Value* value) {
    return value == nullptr ? py::object(py::none()) : py::int_(number(value));
  }

  // A tensor is ("value", number), and a size that is not a plain integer ("size", dim).
  py::object argument(const ops::Arg& arg) {
    if (const auto* value = std::get_if<ir::Value*>(&arg.value)) {
      return py::make_tuple("value", number(*value));
    }
    if (const auto* list = std::get_if<ops::ArgList>(&arg.value)) return argument(*list);
    const auto* dim = std::get_if<ir::Dim>(&arg.value);
    const bool is_size = dim != nullptr && !dim->is_constant();
    return is_size ? py::make_tuple("size", to_plain(*dim)) : number_to_plain(arg);
  }
  py::object argument(const ops::ArgList& args) {
    py::list list;
    for (const ops::Arg& arg : args) list.append(argument(arg));
    return list;
  }

  std::unordered_map<const ir::Value*, int> numbers_;
  py::list calls_;
};

// Sizes of an output, 0 for those that only a call tells, with its dtype.
py::list types_of_outputs(const ir::Graph& graph) {
  py::list types;
  for (const ir::Value* output : graph.outputs) {
    py::list sizes;
    for (const ir::Dim& dim : output->type.shape.value_or(ir::Shape())) {
      sizes.append(dim.is_constant() ? dim.constant() : 0);
    }
    types.append(py::make_tuple(ir::name(output->type.dtype), sizes));
  }
  return types;
}

py::dict program_of(const ir::Graph& graph, const ops::CallList& list) {
  Listing listing(list);
  py::dict result;
  result["symbols"] = graph.symbol_inputs;
  result["inputs"] = listing.named(graph.inputs);
  result["initializers"] = listing.named(graph.initializers);
  result["outputs"] = listing.named(graph.outputs);
  result["types"] = types_of_outputs(graph);
  result["calls"] = listing.calls();
  result["constants"] = listing.constants();
  result["dims"] = listing.dims();
  result["names"] = listing.names();
  return result;
}

py::dict calls_of(const ir::Graph& given) {
  std::unique_ptr<ir::Graph> graph;
  ops::CallList list;
  {
    py::gil_scoped_release release;
    graph = ir::clone(given);
    passes::prepare_file(*graph, true);
    size_t yield = 0;
    list = ops::lower(*graph, yield);
    if (yield != list.calls.size()) {
      throw Unsupported("a training graph, want one of inference: it has a YieldOp");
    }
  }
  return program_of(*graph, list);
}

// ---- types of functions

// Numbers for the inputs that a function reads as such, else (dtype, sizes); None for one that is
// left out.
py::object described(const ir::Node& node, int slot, bool is_number) {
  ir::Value* value = node.inputs[slot];
  if (value == nullptr) return py::none();
  if (!is_number) {
    return py::make_tuple(ir::name(value->type.dtype), to_plain(*value->type.shape));
  }
  if (ops::has_known_ints(value)) return to_plain(ops::known_ints(value));
  return number_to_plain(ops::Arg(ops::known_numbers(node, *value)));
}

// A size that the function does not tell becomes a symbol, in characters that no file can use.
ir::Type type_from(const ir::Node& node, size_t slot, const py::handle& given) {
  const auto [dtype, dims] = given.cast<std::pair<std::string, py::list>>();
  ir::Shape shape;
  for (const py::handle dim : dims) {
    shape.push_back(dim.is_none()
                        ? ir::Dim::symbol(concat(node.outputs[slot]->name, "#", shape.size()))
                        : dim_from_plain(dim));
  }
  ir::Type type;
  type.dtype = ir::dtype_from_name(dtype);
  type.shape = std::move(shape);
  return type;
}

std::vector<ir::Type> ask_for_types(const ir::Node& node) {
  const std::vector<int> numbers = ops::int_inputs(node);
  py::list inputs, is_wanted;
  for (int slot = 0; slot < static_cast<int>(node.inputs.size()); ++slot) {
    const bool is_number = std::count(numbers.begin(), numbers.end(), slot) > 0;
    inputs.append(described(node, slot, is_number));
  }
  for (const ir::Value* output : node.outputs) is_wanted.append(output != nullptr);
  const py::object types_of = py::module_::import("torch_ort.onnx.functions").attr("types_of");
  const py::list given =
      types_of(node.op.domain, node.op.name, inputs, to_plain(node.attrs), is_wanted);
  std::vector<ir::Type> types(node.outputs.size());
  for (size_t slot = 0; slot < types.size(); ++slot) {
    if (node.outputs[slot] == nullptr) continue;
    if (py::object(given[slot]).is_none()) {
      throw UserError(concat(node.op.str(), ": output ", slot, ": got none, want a tensor (node '",
                             node.name, "')"));
    }
    types[slot] = type_from(node, slot, given[slot]);
  }
  return types;
}

// What Python raises, as an error of the engine's.
std::vector<ir::Type> types_of_function(const ir::Node& node) {
  const py::gil_scoped_acquire gil;
  try {
    return ask_for_types(node);
  } catch (const py::error_already_set& error) {
    const std::string words =
        concat(py::str(error.value()).cast<std::string>(), " (node '", node.name, "')");
    if (error.matches(py::module_::import("torch_ort._C").attr("Unsupported"))) {
      throw Unsupported(words);
    }
    throw UserError(words);
  }
}

}  // namespace

void bind_calls(py::module_& module) {
  ops::set_function_types(&types_of_function);
  module.def("calls_of", &calls_of, py::arg("graph"),
             "The calls of PyTorch's operators, and of functions of torch_ort/onnx/functions, that "
             "compute a graph of inference, as lists and tuples (csrc/python/bind_calls.cpp).");
}

}  // namespace torch_ort::python
