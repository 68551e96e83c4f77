// What the machine can do at most.
#include "cpu/peak.h"
#include "python/bind.h"

#include <string>

namespace py = pybind11;

namespace torch_ort::python {

void bind_peak(py::module_& module) {
  using namespace py::literals;
  module.def(
      "measure_peak",
      [](const std::string& dtype, const std::string& isa, int threads) {
        const py::gil_scoped_release release;
        return cpu::peak_flops(ir::dtype_from_name(dtype), cpu::isa_or_best(isa), threads);
      },
      "dtype"_a, "isa"_a = "", "threads"_a = 0,
      "Measure how many floating-point operations a second products can come to: in float32, "
      "float64, bfloat16 or float16, of the widest instruction set if none is named, on all "
      "threads of PyTorch's or on fewer.");
  module.def(
      "measure_copy",
      [](int64_t num_bytes, int threads) {
        const py::gil_scoped_release release;
        return cpu::copy_speed(num_bytes, threads);
      },
      "num_bytes"_a, "threads"_a = 0,
      "Measure how many bytes a second copies read and write whose arrays are so large together.");
}

}  // namespace torch_ort::python
