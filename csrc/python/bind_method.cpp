// Replaces a method that C implements, for those as well who have bound it before.
//
// `f = MyFunction.apply`, which programs write where they define a torch.autograd.Function, is an
// object that refers to the row of the method in a table of C. Whatever is assigned to attributes
// of classes later is not asked for when it is called, and the function of that row is.
#include "base/error.h"
#include "python/bind.h"

#include <string>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

// There is one: a function of C that is called knows nothing but its arguments. Python's lock is
// held by whoever uses it.
struct Replaced {
  PyMethodDef* row = nullptr;
  PyCFunction theirs = nullptr;
  PyObject* ours = nullptr;  // takes the object or class, a tuple, and a dict or None
};
Replaced replaced;

// C's tables name functions of all kinds by one type.
template <typename To, typename From>
To cast(From function) {
  return reinterpret_cast<To>(reinterpret_cast<void (*)()>(function));
}

bool takes_keywords(const PyMethodDef& row) { return (row.ml_flags & METH_KEYWORDS) != 0; }

PyObject* call_ours_by_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
  const auto ours = py::reinterpret_borrow<py::object>(replaced.ours);  // while it runs
  return PyObject_CallFunctionObjArgs(ours.ptr(), self, args, kwargs ? kwargs : Py_None, nullptr);
}

PyObject* call_ours(PyObject* self, PyObject* args) {
  return call_ours_by_keywords(self, args, nullptr);
}

PyCFunction ours_for(const PyMethodDef& row) {
  return takes_keywords(row) ? cast<PyCFunction>(call_ours_by_keywords) : call_ours;
}

PyMethodDef& row_of(const py::handle& descriptor) {
  const bool is_of_c = Py_IS_TYPE(descriptor.ptr(), &PyClassMethodDescr_Type) ||
                       Py_IS_TYPE(descriptor.ptr(), &PyMethodDescr_Type);
  if (is_of_c) {
    PyMethodDef& row = *reinterpret_cast<PyMethodDescrObject*>(descriptor.ptr())->d_method;
    if ((row.ml_flags & ~(METH_CLASS | METH_KEYWORDS)) == METH_VARARGS) return row;
  }
  throw Unsupported(concat(std::string(py::str(descriptor)),
                           ": cannot be replaced: it is no method of C's that takes a tuple of "
                           "arguments"));
}

void replace_method(const py::handle& descriptor, py::object ours) {
  PyMethodDef& row = row_of(descriptor);
  ORT_CHECK(!replaced.ours && (!replaced.row || replaced.row == &row),
            "another method is replaced: ", row.ml_name);
  if (!replaced.row) {
    replaced.theirs = row.ml_meth;
    replaced.row = &row;
  }
  replaced.ours = ours.release().ptr();
  row.ml_meth = ours_for(row);
}

void restore_method() {
  replaced.row->ml_meth = replaced.theirs;
  Py_CLEAR(replaced.ours);
}

py::object call_replaced(const py::handle& self, const py::tuple& args, const py::dict& kwargs) {
  PyObject* result = nullptr;
  if (takes_keywords(*replaced.row)) {
    result = cast<PyCFunctionWithKeywords>(replaced.theirs)(
        self.ptr(), args.ptr(), kwargs.empty() ? nullptr : kwargs.ptr());
  } else if (kwargs.empty()) {
    result = replaced.theirs(self.ptr(), args.ptr());
  } else {
    throw py::type_error(concat(replaced.row->ml_name, "() takes no keyword arguments"));
  }
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

void bind_method(py::module_& module) {
  using namespace py::literals;
  module.def("replace_method", replace_method, "descriptor"_a, "ours"_a,
             "Let a method of C's call `ours(self, args, kwargs)`; kwargs is None if there are "
             "none. Raises Unsupported for another kind of object.");
  module.def("restore_method", restore_method, "Let the method that is replaced be as it was.");
  module.def("call_replaced", call_replaced, "self"_a, "args"_a, "kwargs"_a,
             "Call what the method that is, or was, replaced calls otherwise.");
  module.def(
      "is_replaced",
      [](const py::handle& descriptor) {
        const PyMethodDef& row = row_of(descriptor);
        return row.ml_meth == ours_for(row);
      },
      "descriptor"_a, "Tell whether a method of C's is replaced now.");
}

}  // namespace torch_ort::python
