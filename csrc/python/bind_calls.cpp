// A graph as the calls of PyTorch's operators that compute it, for Python to write as a module.
#include "base/error.h"
#include "ir/edit.h"
#include "ops/op.h"
#include "passes/pass.h"
#include "python/bind.h"

#include <pybind11/complex.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <type_traits>
#include <unordered_map>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

const char* name_of(ir::DimOp op) {
  switch (op) {
    case ir::DimOp::kAdd: return "add";
    case ir::DimOp::kSub: return "sub";
    case ir::DimOp::kMul: return "mul";
    case ir::DimOp::kFloorDiv: return "floordiv";
    case ir::DimOp::kMod: return "mod";
    case ir::DimOp::kPow: return "pow";
    case ir::DimOp::kMin: return "min";
    case ir::DimOp::kMax: return "max";
    default: throw Unsupported("a size that depends on a condition");
  }
}

// An integer, ("symbol", name), or (operation, dim, dim).
py::object to_python(const ir::Dim& dim) {
  if (dim.is_constant()) return py::int_(dim.constant());
  if (dim.is_symbol()) return py::make_tuple("symbol", dim.name());
  return py::make_tuple(name_of(dim.op()), to_python(dim.lhs()), to_python(dim.rhs()));
}

py::list to_python(const ir::Shape& shape) {
  py::list dims;
  for (const ir::Dim& dim : shape) dims.append(to_python(dim));
  return dims;
}

// Numbers the values of a graph and of its calls.
class Listing {
 public:
  explicit Listing(const ops::CallList& list) {
    for (const ops::Call& call : list.calls) {
      py::list outputs;
      for (const ir::Value* value : call.outputs) outputs.append(reference(value));
      calls_.append(py::make_tuple(call.op, call.overload, argument(call.args), outputs,
                                   call.node->op.str(), call.node->name));
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

  // Dims of values that have symbols, by number.
  py::dict dims() const {
    py::dict all;
    for (const auto& [value, number] : numbers_) {
      if (value->type.shape && !ir::is_constant(*value->type.shape)) {
        all[py::int_(number)] = to_python(*value->type.shape);
      }
    }
    return all;
  }

 private:
  int number(const ir::Value* value) {
    return numbers_.try_emplace(value, static_cast<int>(numbers_.size())).first->second;
  }
  py::object reference(const ir::Value* value) {
    return value == nullptr ? py::object(py::none()) : py::int_(number(value));
  }

  // A tensor is ("value", number), and a size that is not a plain integer ("size", dim).
  py::object argument(const ops::Arg& arg) {
    return std::visit(
        [this](const auto& value) -> py::object {
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, std::monostate>) {
            return py::none();
          } else if constexpr (std::is_same_v<T, ir::Value*>) {
            return py::make_tuple("value", number(value));
          } else if constexpr (std::is_same_v<T, ir::Dim>) {
            if (value.is_constant()) return py::int_(value.constant());
            return py::make_tuple("size", to_python(value));
          } else if constexpr (std::is_same_v<T, ops::ArgList>) {
            return argument(value);
          } else {
            return py::cast(value);
          }
        },
        arg.value);
  }
  py::object argument(const ops::ArgList& args) {
    py::list list;
    for (const ops::Arg& arg : args) list.append(argument(arg));
    return list;
  }

  std::unordered_map<const ir::Value*, int> numbers_;
  py::list calls_;
};

py::dict calls_of(const ir::Graph& given) {
  std::unique_ptr<ir::Graph> graph;
  ops::CallList list;
  {
    py::gil_scoped_release release;
    graph = ir::clone(given);
    passes::prepare_file(*graph);
    size_t yield = 0;
    list = ops::lower(*graph, yield);
    if (yield != list.calls.size()) {
      throw Unsupported("a training graph, want one of inference: it has a YieldOp");
    }
  }
  Listing listing(list);
  py::dict result;
  result["inputs"] = listing.named(graph->inputs);
  result["initializers"] = listing.named(graph->initializers);
  result["outputs"] = listing.named(graph->outputs);
  result["calls"] = listing.calls();
  result["constants"] = listing.constants();
  result["dims"] = listing.dims();
  return result;
}

}  // namespace

void bind_calls(py::module_& module) {
  module.def("calls_of", &calls_of, py::arg("graph"),
             "The calls of PyTorch's operators that compute a graph of inference, as lists and "
             "tuples (csrc/python/bind_calls.cpp).");
}

}  // namespace torch_ort::python
