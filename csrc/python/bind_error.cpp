// The error types as Python classes.
#include "base/error.h"
#include "python/bind.h"

#include <pybind11/pybind11.h>

#include <exception>
#include <string_view>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

// Never destroyed, because errors may be raised while the interpreter shuts down.
PyObject* error_class = nullptr;
PyObject* unsupported_class = nullptr;
PyObject* user_error_class = nullptr;
PyObject* internal_error_class = nullptr;
PyObject* device_error_class = nullptr;

PyObject* make_class(py::module_& module, const char* name, const char* doc, py::handle bases) {
  const std::string qualified = std::string("torch_ort.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (!made) throw py::error_already_set();
  module.attr(name) = py::handle(made);
  return made;
}

// A message may contain any bytes of a damaged file.
void set_error(PyObject* type, std::string_view message) {
  PyObject* text = PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()),
                                        "backslashreplace");
  if (!text) return;
  PyErr_SetObject(type, text);
  Py_DECREF(text);
}

}  // namespace

bool set_error_of_ours(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const Unsupported& error) {
    set_error(unsupported_class, error.what());
  } catch (const UserError& error) {
    set_error(user_error_class, error.what());
  } catch (const InternalError& error) {
    set_error(internal_error_class, error.what());
  } catch (const DeviceError& error) {
    set_error(device_error_class, error.what());
  } catch (const Error& error) {
    set_error(error_class, error.what());
  } catch (...) {
    return false;
  }
  return true;
}

void raise_as_not_begun(std::exception_ptr thrown) {
  if (set_error_of_ours(thrown)) thrown = std::make_exception_ptr(py::error_already_set());
  try {
    std::rethrow_exception(thrown);
  } catch (const py::error_already_set& error) {
    py::setattr(error.value(), "torch_ort_nothing_ran", py::bool_(true));
    throw;
  }
}

void bind_errors(py::module_& module) {
  error_class = make_class(module, "Error", "What torch_ort raises.", PyExc_RuntimeError);
  unsupported_class = make_class(
      module, "Unsupported", "The graph holds something that the engine does not do.", error_class);
  user_error_class =
      make_class(module, "UserError", "The caller can mend it.",
                 py::make_tuple(py::handle(error_class), py::handle(PyExc_ValueError)));
  internal_error_class = make_class(module, "InternalError", "A bug of torch_ort.", error_class);
  device_error_class = make_class(
      module, "DeviceError",
      "A device is lost to this process; eager PyTorch cannot go on there either.", error_class);
  // A local translator: torch's modules share one table of translators, which must not contain
  // ours.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    if (thrown && !set_error_of_ours(thrown)) std::rethrow_exception(thrown);
  });
}

}  // namespace torch_ort::python
