// The extension module torch_ort._C.
#include "python/bind.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ engine of torch_ort. Its names are not a public interface.";
  module.def_submodule("testing", "What only tests and debugging tools call.");
  torch_ort::python::bind_errors(module);
  torch_ort::python::bind_codegen(module);
  torch_ort::python::bind_cuda(module);
  torch_ort::python::bind_ir(module);
  torch_ort::python::bind_convert(module);
  torch_ort::python::bind_passes(module);
  torch_ort::python::bind_plan(module);
  torch_ort::python::bind_options(module);
  torch_ort::python::bind_run(module);
  torch_ort::python::bind_device_graphs(module);
  torch_ort::python::bind_step(module);
  torch_ort::python::bind_optim(module);
  torch_ort::python::bind_peak(module);
  torch_ort::python::bind_product(module);
  torch_ort::python::bind_tuning(module);
  torch_ort::python::bind_capture(module);
  torch_ort::python::bind_numbers(module);
  torch_ort::python::bind_guard(module);
  torch_ort::python::bind_torchscript(module);
  torch_ort::python::bind_files(module);
  torch_ort::python::bind_python_op(module);
  torch_ort::python::bind_calls(module);
  torch_ort::python::bind_method(module);
}
