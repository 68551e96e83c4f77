// Choices among kernels that were measured.
#include "python/bind.h"
#include "run/tuning.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace torch_ort::python {

void bind_tuning(py::module_& module) {
  using namespace py::literals;
  py::class_<run::KernelChoice>(module, "KernelChoice",
                                "Who multiplies matrices of one kind: the engine's own kernel, or "
                                "the one of torch; and the microseconds that both took.")
      .def(py::init<bool, double, double>(), "is_own"_a, "own_us"_a, "torch_us"_a)
      .def_readonly("is_own", &run::KernelChoice::is_own)
      .def_readonly("own_us", &run::KernelChoice::own_us)
      .def_readonly("torch_us", &run::KernelChoice::torch_us);
  module.def("kernel_choices", &run::all_choices,
             "Kernels chosen by measuring, here or where a file was written, by words for the "
             "product.");
  module.def("load_kernel_choices", &run::load_choices, "choices"_a,
             "Take in what files hold, and give how many were new: what is chosen already stays.");
  module.def("forget_kernel_choices", &run::forget_choices,
             "From now on products are chosen for as if none had been measured.");
  module.attr("testing").attr("time_in_turns") = py::cpp_function(
      [](const std::function<void()>& own, const std::function<void()>& torch, double most_ms,
         const std::function<double()>& now_us) {
        const run::KernelTimes times = run::time_in_turns(own, torch, most_ms, now_us);
        return py::make_tuple(times.own_us, times.torch_us, times.rounds);
      },
      "own"_a, "torch"_a, "most_ms"_a, "now_us"_a,
      "Time two functions by a clock; give the microseconds of the fastest run of each, and how "
      "often both ran.");
  module.attr("testing").attr("choose_own") = py::cpp_function(
      [](double own_us, double torch_us, bool prefers_own) {
        return run::choose_own({own_us, torch_us, 1}, prefers_own);
      },
      "own_us"_a, "torch_us"_a, "prefers_own"_a);
}

}  // namespace torch_ort::python
