// Errors that cross from C++ into Python. The engine's keep their types; torch's become what eager
// PyTorch raises.
#pragma once

#include "base/error.h"
#include "python/bind.h"
#include "run/call_watch.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <new>

namespace torch_ort::python {

// Runs a function that may throw torch's errors, inside of a binding.
template <typename Function>
auto with_torch_errors(Function&& function) {
  try {
    return function();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "out of memory");
    throw pybind11::error_already_set();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw pybind11::error_already_set();
  }
}

// Runs a call of a session inside of a binding. An error from before the first step is marked by
// its attribute `torch_ort_nothing_ran`.
template <typename Function>
auto with_errors_of_calls(Function&& function) {
  const run::CallWatch watch;
  try {
    return with_torch_errors(function);
  } catch (...) {
    if (watch.has_begun()) throw;
    raise_as_not_begun(std::current_exception());
  }
}

}  // namespace torch_ort::python
