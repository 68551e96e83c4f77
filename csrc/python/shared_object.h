// Python objects held by what knows nothing of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace torch_ort::python {

// An object that may be let go of by any thread, without the GIL.
inline std::shared_ptr<pybind11::object> shared_object(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            if (Py_IsInitialized() == 0) return;  // leaked: the interpreter is gone
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace torch_ort::python
