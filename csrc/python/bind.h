// The pybind11 bindings: one function for each room that Python sees, in bind_<room>.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace torch_ort::python {

// Sets Python's error from an exception of the engine. Returns false if the exception is another
// one.
bool set_error_of_ours(std::exception_ptr thrown);

// Throws the exception as a Python error, with an attribute that says that no step has run.
[[noreturn]] void raise_as_not_begun(std::exception_ptr thrown);

void bind_device_graphs(pybind11::module_& module);
void bind_errors(pybind11::module_& module);
void bind_ir(pybind11::module_& module);
void bind_convert(pybind11::module_& module);
void bind_passes(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_options(pybind11::module_& module);
void bind_run(pybind11::module_& module);
void bind_step(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_codegen(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_peak(pybind11::module_& module);
void bind_product(pybind11::module_& module);
void bind_tuning(pybind11::module_& module);
void bind_calls(pybind11::module_& module);
void bind_capture(pybind11::module_& module);
void bind_numbers(pybind11::module_& module);
void bind_guard(pybind11::module_& module);
void bind_torchscript(pybind11::module_& module);
void bind_files(pybind11::module_& module);
void bind_python_op(pybind11::module_& module);
void bind_method(pybind11::module_& module);

}  // namespace torch_ort::python
