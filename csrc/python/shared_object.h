// Python objects that C++ code without knowledge of Python holds.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace torch_ort::python {

// Returns a pointer that any thread may release, with or without the GIL.
inline std::shared_ptr<pybind11::object> shared_object(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            // After the interpreter has ended the object is leaked.
            if (Py_IsInitialized() == 0) return;
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace torch_ort::python
