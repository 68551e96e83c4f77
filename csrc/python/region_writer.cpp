#include "python/region_writer.h"

#include "cuda/body.h"
#include "cuda/faults.h"
#include "cuda/region.h"
#include "python/shared_object.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using namespace py::literals;
using cuda::Body;
using cuda::Value;
using region::Access;

constexpr const char* kKinds[] = {"constant",  "ratio",   "columns", "input", "gather",
                                  "pointwise", "reduced", "scatter", "random"};
constexpr const char* kReductions[] = {"sum", "max", "min", "pick"};

py::list axes(const std::vector<Access::Axis>& of) {
  py::list list;
  for (const Access::Axis& axis : of) list.append(py::make_tuple(axis.size, axis.stride));
  return list;
}

py::dict dict_of(const Access& access) {
  return py::dict("dtype"_a = ir::name(access.dtype), "rows"_a = axes(access.rows),
                  "columns"_a = axes(access.columns), "result"_a = access.result,
                  "begin"_a = access.begin);
}

py::dict dict_of(const Value& value) {
  const bool is_pointwise = value.kind == Value::Kind::kPointwise;
  return py::dict(
      "kind"_a = kKinds[static_cast<size_t>(value.kind)], "space"_a = region::name(value.space),
      "known_in"_a = value.known_in, "op"_a = is_pointwise ? ops::word(value.op).name : "",
      "operands"_a = value.operands, "input"_a = value.input, "ids"_a = value.ids,
      "number"_a = value.number, "reduction"_a = kReductions[static_cast<size_t>(value.reduction)],
      "ignored"_a = value.has_ignored ? py::object(py::int_(value.ignored)) : py::none(),
      "stream"_a = value.stream, "keep"_a = value.keep, "origin"_a = value.origin);
}

py::dict dict_of(const cuda::Store& store) {
  return py::dict("value"_a = store.value, "to"_a = dict_of(store.to), "is_full"_a = store.is_full);
}

py::dict dict_of(const cuda::RowsSum& sum) {
  return py::dict("value"_a = sum.value, "to"_a = dict_of(sum.to), "is_total"_a = sum.is_total,
                  "is_of_rows"_a = sum.is_of_rows);
}

template <typename Each>
py::list list_of(const std::vector<Each>& all) {
  py::list list;
  for (const Each& each : all) list.append(dict_of(each));
  return list;
}

py::dict dict_of(const region::BoundSchedule& bound, const Body& body, const ir::Device& device) {
  py::list needed;
  const std::vector<bool> none(body.values.size(), false);
  for (int pass = 0; pass <= body.last_pass; ++pass) needed.append(body.needed_in(pass, none));
  return py::dict("rows"_a = bound.num_rows, "columns"_a = bound.num_columns,
                  "groups"_a = bound.num_groups, "is_double"_a = bound.is_double,
                  "device"_a = device.kind, "inputs"_a = list_of(body.inputs),
                  "output_names"_a = body.output_names, "values"_a = list_of(body.values),
                  "stores"_a = list_of(body.stores), "sums"_a = list_of(body.sums),
                  "needed"_a = needed, "graph"_a = py::cast(bound.schedule.spec.body));
}

class PythonKernel final : public region::Kernel {
 public:
  PythonKernel(py::object kernel, size_t num_inputs, size_t num_outputs, bool is_on_host,
               int device)
      : kernel_(shared_object(std::move(kernel))),
        num_inputs_(num_inputs),
        num_outputs_(num_outputs),
        is_on_host_(is_on_host),
        device_(device) {}

  // A GPU tells of a label or id that is out of bounds at the next call, the host after this one.
  void run(const void* const* inputs, void* const* outputs) const override {
    if (is_on_host_) {
      cuda::HostFaults faults;
      start(inputs, outputs, faults.word());
      faults.check();
    } else {
      cuda::Faults& faults = cuda::faults(device_);
      faults.check();
      start(inputs, outputs, faults.word());
    }
  }

  std::string str() const override {
    const py::gil_scoped_acquire gil;
    return kernel_->attr("text").cast<std::string>();
  }

 private:
  void start(const void* const* inputs, void* const* outputs, void* faults) const {
    const py::gil_scoped_acquire gil;
    const auto addresses = [](const auto* of, size_t count) {
      py::list list;
      for (size_t i = 0; i < count; ++i) {
        list.append(py::int_(reinterpret_cast<uintptr_t>(of[i])));
      }
      return list;
    };
    kernel_->attr("run")(addresses(inputs, num_inputs_), addresses(outputs, num_outputs_),
                         reinterpret_cast<uintptr_t>(faults), device_);
  }

  std::shared_ptr<py::object> kernel_;
  size_t num_inputs_, num_outputs_;
  bool is_on_host_;
  int device_;
};

class PythonWriter final : public region::RegionWriter {
 public:
  explicit PythonWriter(py::object write) : write_(shared_object(std::move(write))) {}

  const py::object& function() const { return *write_; }

  std::unique_ptr<const region::Kernel> compile(
      const region::Schedule& schedule, const ir::SymbolLookup& lookup,
      const std::vector<region::Layout>& inputs, const std::vector<region::Layout>& outputs,
      const ir::Device& device, const region::CodegenOptions& options) const override {
    if (schedule.spec.has_row_list) return nullptr;
    const region::BoundSchedule bound(schedule, lookup, inputs, outputs, cuda::can_load);
    const Body body = cuda::make_body(bound, options.round_short_floats);
    const py::gil_scoped_acquire gil;
    py::object kernel = (*write_)(dict_of(bound, body, device));
    if (kernel.is_none()) return nullptr;
    return std::make_unique<const PythonKernel>(std::move(kernel), inputs.size(), outputs.size(),
                                                ir::is_host(device), options.device);
  }

 private:
  std::shared_ptr<py::object> write_;
};

}  // namespace

std::shared_ptr<const region::RegionWriter> region_writer(py::object write) {
  return std::make_shared<const PythonWriter>(std::move(write));
}

py::object function_of(const region::RegionWriter* writer) {
  const auto* ours = dynamic_cast<const PythonWriter*>(writer);
  return ours == nullptr ? py::none() : ours->function();
}

}  // namespace torch_ort::python
