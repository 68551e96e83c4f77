// Errors of ours on their way through autograd, which makes a RuntimeError of all but Python's.
#pragma once

#include "base/error.h"

#include <exception>

namespace torch_ort::run {

// Gives an error of ours as one of Python's. Set when the module is loaded.
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
