// CUDA graphs: PyTorch captures them by a function of Python's.
#include "cuda/driver.h"
#include "cuda/faults.h"
#include "cuda/stream.h"
#include "python/bind.h"
#include "python/shared_object.h"
#include "run/device_graph.h"
#include "run/session.h"

#include <pybind11/stl.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using namespace py::literals;

class PythonGraph final : public run::DeviceGraph {
 public:
  PythonGraph(py::object graph, int device) : device_(device) {
    replay_ = shared_object(graph.attr("replay"));
  }

  void replay() const override {
    cuda::faults(device_).check();
    const py::gil_scoped_acquire gil;
    (*replay_)();
  }

 private:
  std::shared_ptr<py::object> replay_;  // a bound method, which holds the graph
  int device_;
};

class PythonGraphs final : public run::DeviceGraphs {
 public:
  explicit PythonGraphs(py::object capture) : capture_(shared_object(std::move(capture))) {}

  std::string missing() const override { return cuda::Driver::missing(); }

  bool is_capturing(c10::DeviceIndex device) const override {
    return cuda::Driver::get().is_capturing(device, cuda::current_stream(device));
  }

  std::unique_ptr<const run::DeviceGraph> capture(
      c10::DeviceIndex device, const std::function<void()>& queue) const override {
    std::exception_ptr failure;
    const py::gil_scoped_acquire gil;
    // Python ends the capture before the exception goes on.
    const auto try_to_queue = [&] {
      const py::gil_scoped_release release;
      try {
        queue();
      } catch (...) {
        failure = std::current_exception();
      }
    };
    py::object graph;
    try {
      graph = (*capture_)(static_cast<int>(device), py::cpp_function(try_to_queue));
    } catch (const py::error_already_set&) {
      if (!failure) throw;
    }
    if (failure) std::rethrow_exception(failure);
    return std::make_unique<const PythonGraph>(std::move(graph), device);
  }

 private:
  std::shared_ptr<py::object> capture_;
};

py::object replay_report(const run::Session& session) {
  const auto report = session.followed()->graph->replay_report();
  if (!report) return py::none();
  py::list parts;
  for (const run::ReplayReport::Part& part : report->parts) {
    parts.append(py::dict("half"_a = part.range.is_backward ? "backward" : "forward",
                          "begin"_a = part.range.begin, "end"_a = part.range.end,
                          "captures"_a = part.captures, "replays"_a = part.replays,
                          "runs"_a = part.runs, "refused"_a = part.refused));
  }
  return py::dict("refused"_a = report->refused, "parts"_a = parts);
}

}  // namespace

void bind_device_graphs(py::module_& module) {
  module.def(
      "set_device_graphs",
      [](py::object capture) {
        run::set_device_graphs(std::make_unique<const PythonGraphs>(std::move(capture)));
      },
      "capture"_a,
      "Say how PyTorch captures CUDA graphs: capture(device, queue) calls queue() once, and "
      "returns an object with a method replay().");
  module.def("replay_report", &replay_report, "session"_a,
             "Say which parts of the plan that was used last are CUDA graphs; None if none were "
             "asked for, or before the first run.");
}

}  // namespace torch_ort::python
