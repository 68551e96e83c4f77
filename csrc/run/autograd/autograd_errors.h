// Carries the engine's errors through autograd, which turns every C++ exception but Python errors
// into a RuntimeError.
#pragma once

#include "base/error.h"

#include <exception>

namespace torch_ort::run {

// Converts an exception of the engine to a Python error. Set when the module is loaded.
using AsPythonError = std::exception_ptr (*)(std::exception_ptr ours);
inline AsPythonError as_python_error = nullptr;

template <typename Function>
auto with_python_errors(Function&& function) {
  try {
    return function();
  } catch (const Error&) {
    std::rethrow_exception(as_python_error(std::current_exception()));
  }
}

}  // namespace torch_ort::run
