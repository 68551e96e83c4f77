// Sizes, numbers and attributes of a graph as plain values of Python, and back.
#pragma once

#include "ir/attr.h"
#include "ops/call.h"

#include <pybind11/pybind11.h>

namespace torch_ort::python {

// An integer, ("symbol", name), or (operation, dim, dim). Unsupported for a dim that depends on a
// condition.
pybind11::object to_plain(const ir::Dim& dim);
pybind11::list to_plain(const ir::Shape& shape);
// The same read back. UserError for anything else.
ir::Dim dim_from_plain(const pybind11::handle& plain);
// An argument that is a number, a text or a list of such; a tensor is an InternalError.
pybind11::object number_to_plain(const ops::Arg& number);
// Numbers, texts and lists of such; a tensor is (dtype, sizes, bytes). Unsupported for a graph.
pybind11::dict to_plain(const ir::Attrs& attrs);

}  // namespace torch_ort::python
