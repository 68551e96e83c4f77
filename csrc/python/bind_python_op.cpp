// Where PythonOp steps enter the interpreter.
#include "python/bind.h"
#include "python/shared_object.h"
#include "python/torch_errors.h"
#include "run/autograd/python_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using run::PythonFunction;
using Tensors = PythonFunction::Tensors;

// The attribute by which captures and fallbacks recognize errors of a Function.
constexpr const char* kMark = "torch_ort_function";

[[noreturn]] void raise_again(const std::string& name) {
  const py::gil_scoped_acquire gil;
  torch::translate_exception_to_python(std::current_exception());
  py::error_already_set error;
  if (PyObject_SetAttrString(error.value().ptr(), kMark, py::str(name).ptr()) != 0) PyErr_Clear();
  throw error;
}

at::Tensor tensor_or_none(PyObject* object) {
  return THPVariable_Check(object) ? THPVariable_Unpack(object) : at::Tensor();
}

Tensors tensors_in(PyObject* result) {
  if (!PyTuple_Check(result)) return {tensor_or_none(result)};
  Tensors tensors;
  const Py_ssize_t count = PyTuple_GET_SIZE(result);
  tensors.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    tensors.push_back(tensor_or_none(PyTuple_GET_ITEM(result, i)));
  }
  return tensors;
}

// Calls `function(*tensors, *sizes)`. The GIL is held from the first Python object to the last.
PythonFunction::Call caller_of(py::object function) {
  return [held = shared_object(std::move(function))](
             Tensors tensors, const std::vector<int64_t>& sizes, PythonFunction::Take take) {
    const py::gil_scoped_acquire gil;
    py::tuple args(tensors.size() + sizes.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      PyObject* wrapped = THPVariable_Wrap(tensors[i]);
      if (wrapped == nullptr) throw python_error();
      PyTuple_SET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i), wrapped);
    }
    for (size_t i = 0; i < sizes.size(); ++i) args[tensors.size() + i] = py::int_(sizes[i]);
    const auto result =
        py::reinterpret_steal<py::object>(PyObject_Call(held->ptr(), args.ptr(), nullptr));
    if (!result) throw py::error_already_set();
    args = py::tuple();
    tensors.clear();
    take(tensors_in(result.ptr()));
  };
}

int64_t add_function(py::object function, const std::string& name,
                     const std::vector<bool>& requires_grad, const std::vector<bool>& written,
                     bool grad_mode, const std::vector<int>& outputs, size_t num_results) {
  return run::add_python_function({.name = name,
                                   .call = caller_of(std::move(function)),
                                   .requires_grad = requires_grad,
                                   .written = written,
                                   .grad_mode = grad_mode,
                                   .outputs = outputs,
                                   .num_results = num_results});
}

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

OptionalTensors run_grad_fn(const at::Tensor& output, const OptionalTensors& given) {
  Tensors gradients;
  for (const auto& gradient : given) gradients.push_back(gradient.value_or(at::Tensor()));
  Tensors results = with_torch_errors([&] {
    const py::gil_scoped_release release;
    return run::run_grad_fn(output, std::move(gradients));
  });
  OptionalTensors found;
  for (at::Tensor& result : results) {
    found.push_back(result.defined() ? std::optional(std::move(result)) : std::nullopt);
  }
  return found;
}

// Kernels of fake tensors are called below autograd, but a Function needs autograd.
py::object call_with_autograd(const py::object& function) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard guard(keys);
  return function();
}

}  // namespace

void bind_python_op(py::module_& module) {
  run::set_raise_again(&raise_again);
  module.def("add_python_function", &add_function, py::arg("function"), py::arg("name"),
             py::arg("requires_grad"), py::arg("written"), py::arg("grad_mode"), py::arg("outputs"),
             py::arg("num_results"));
  module.def("remove_python_function", &run::remove_python_function);
  module.def("set_python_function_form", &run::set_form);
  module.def("set_gradients", &run::set_gradients);
  module.def("run_grad_fn", &run_grad_fn,
             "Run the backward of the Function that made a tensor, outside of a backward pass.");
  module.def("call_with_autograd", &call_with_autograd,
             "Call something as if no kernel stood between it and the user's program.");
  module.def("num_python_contexts", &run::num_python_contexts);
}

}  // namespace torch_ort::python
