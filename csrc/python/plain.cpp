#include "python/plain.h"

#include "base/error.h"

#include <pybind11/complex.h>
#include <pybind11/stl.h>

#include <iterator>
#include <string>
#include <type_traits>
#include <variant>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

struct Named {
  ir::DimOp op;
  const char* name;
};

constexpr Named kOperations[] = {
    {ir::DimOp::kAdd, "add"}, {ir::DimOp::kSub, "sub"},           {ir::DimOp::kMul, "mul"},
    {ir::DimOp::kMod, "mod"}, {ir::DimOp::kFloorDiv, "floordiv"}, {ir::DimOp::kPow, "pow"},
    {ir::DimOp::kMin, "min"}, {ir::DimOp::kMax, "max"},
};

const char* name_of(ir::DimOp op) {
  for (const Named& each : kOperations) {
    if (each.op == op) return each.name;
  }
  throw Unsupported("a size that depends on a condition");
}

ir::DimOp operation_of(const std::string& name) {
  for (const Named& each : kOperations) {
    if (each.name == name) return each.op;
  }
  throw UserError(concat("a size: got the operation '", name, "'"));
}

}  // namespace

py::object to_plain(const ir::Dim& dim) {
  if (dim.is_constant()) return py::int_(dim.constant());
  if (dim.is_symbol()) return py::make_tuple("symbol", dim.name());
  return py::make_tuple(name_of(dim.op()), to_plain(dim.lhs()), to_plain(dim.rhs()));
}

py::list to_plain(const ir::Shape& shape) {
  py::list dims;
  for (const ir::Dim& dim : shape) dims.append(to_plain(dim));
  return dims;
}

ir::Dim dim_from_plain(const py::handle& plain) {
  if (py::isinstance<py::int_>(plain)) return plain.cast<int64_t>();
  const auto parts = plain.cast<py::tuple>();
  const auto kind = parts[0].cast<std::string>();
  if (kind == "symbol") return ir::Dim::symbol(parts[1].cast<std::string>());
  return ir::Dim::make(operation_of(kind), dim_from_plain(parts[1]), dim_from_plain(parts[2]));
}

py::object number_to_plain(const ops::Arg& number) {
  return std::visit(
      [](const auto& value) -> py::object {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, ir::Value*>) {
          throw InternalError("a number: got a tensor");
        } else if constexpr (std::is_same_v<T, ir::Dim>) {
          return to_plain(value);
        } else if constexpr (std::is_same_v<T, ops::ArgList>) {
          py::list list;
          for (const ops::Arg& each : value) list.append(number_to_plain(each));
          return list;
        } else {
          return py::cast(value);
        }
      },
      number.value);
}

py::dict to_plain(const ir::Attrs& attrs) {
  py::dict plain;
  for (const auto& [name, attr] : attrs) {
    plain[py::str(name)] = std::visit(
        [&name = name](const auto& value) -> py::object {
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, std::shared_ptr<ir::Graph>>) {
            throw Unsupported(concat("attribute '", name, "': got a graph"));
          } else if constexpr (std::is_same_v<T, std::shared_ptr<const ir::TensorData>>) {
            return py::make_tuple(
                ir::name(value->dtype), value->shape,
                py::bytes(reinterpret_cast<const char*>(value->bytes), value->num_bytes));
          } else if constexpr (std::is_same_v<T, ir::Dim> || std::is_same_v<T, ir::Shape>) {
            return to_plain(value);
          } else {
            return py::cast(value);
          }
        },
        attr);
  }
  return plain;
}

}  // namespace torch_ort::python
