// Guards of graphs that are captured from a module.
#include "python/bind.h"
#include "python/call_guard.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

// The guard in an object; nullptr while the object is being made.
CallGuard* guard_of(PyObject* object) {
  auto* instance = reinterpret_cast<py::detail::instance*>(object);
  const py::detail::value_and_holder held = instance->get_value_and_holder();
  return held.holder_constructed() ? held.value_ptr<CallGuard>() : nullptr;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  const CallGuard* guard = guard_of(object);
  return guard == nullptr ? 0 : guard->visit_objects(visit, arg);
}

int clear(PyObject* object) {
  if (CallGuard* guard = guard_of(object)) guard->clear();
  return 0;
}

void take_part_in_collections(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = traverse;
  type->ht_type.tp_clear = clear;
}

}  // namespace

void bind_guard(py::module_& module) {
  using namespace py::literals;
  py::class_<CallGuard>(module, "CallGuard", py::custom_type_setup(take_part_in_collections))
      .def(py::init<py::handle, const py::list&, const py::list&>(), "inputs"_a, "state"_a,
           "reads"_a)
      .def("match", &CallGuard::match, "args"_a, "kwargs"_a,
           "The graph's arguments, or None if it is for other calls.")
      .def("tensors", &CallGuard::tensors, "args"_a, "kwargs"_a,
           "The tensors of a call that fits, as they were given.")
      .def("mismatch", &CallGuard::mismatch, "args"_a, "kwargs"_a,
           "What keeps the graph from serving a call; empty if nothing does.");
  module.def("memory_order", &memory_order, "tensor"_a,
             "The dims in the order in which they lie in memory; empty if it is row-major.");
}

}  // namespace torch_ort::python
