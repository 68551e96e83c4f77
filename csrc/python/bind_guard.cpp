// Guards of graphs that are captured from a module.
#include "python/bind.h"
#include "python/call_guard.h"

namespace py = pybind11;

namespace torch_ort::python {

void bind_guard(py::module_& module) {
  using namespace py::literals;
  py::class_<CallGuard>(module, "CallGuard")
      .def(py::init<py::handle, const py::list&, const py::list&>(), "inputs"_a, "state"_a,
           "reads"_a)
      .def("match", &CallGuard::match, "args"_a, "kwargs"_a,
           "The graph's arguments, or None if it is for other calls.")
      .def("tensors", &CallGuard::tensors, "args"_a, "kwargs"_a,
           "The tensors of a call that fits, as they were given.")
      .def("mismatch", &CallGuard::mismatch, "args"_a, "kwargs"_a,
           "What keeps the graph from serving a call; empty if nothing does.");
}

}  // namespace torch_ort::python
