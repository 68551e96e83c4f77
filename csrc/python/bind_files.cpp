// What prepares a graph for a file (torch_ort/engine/onnx_files.py). Writing itself is Graph.save.
#include "base/error.h"
#include "convert/portable.h"
#include "ir/edit.h"
#include "passes/memory.h"
#include "python/bind.h"
#include "run/dtype.h"

#include <torch/csrc/utils/pybind.h>

#include <map>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

std::shared_ptr<const ir::TensorData> data_of(const at::Tensor& tensor) {
  const auto kept = std::make_shared<const at::Tensor>(
      tensor.detach().resolve_conj().resolve_neg().cpu().contiguous());
  auto data = std::make_shared<ir::TensorData>();
  *data = {run::dtype(kept->scalar_type()), kept->sizes().vec(),
           static_cast<const std::byte*>(kept->const_data_ptr()), kept->nbytes(), kept};
  return data;
}

// Values that the graph writes to stay inputs, so that the caller sees what was written.
void give_data(ir::Graph& graph, const std::map<std::string, at::Tensor>& tensors) {
  const passes::SharedMemory memory(graph);
  for (const auto& [name, tensor] : tensors) {
    ir::Value* value = ir::find_value(graph, name);
    ORT_CHECK(value != nullptr, "files: no value '", name, "'");
    if (memory.is_written(value) || tensor.layout() != at::kStrided) continue;
    ir::give_data(graph, *value, data_of(tensor));
  }
}

void take_names(ir::Graph& graph, const std::map<std::string, std::string>& names) {
  // All values are found before the first is renamed, because a new name may be the old name of
  // another.
  std::vector<std::pair<ir::Value*, std::string>> values;
  for (const auto& [old_name, new_name] : names) {
    if (ir::Value* value = ir::find_value(graph, old_name)) values.emplace_back(value, new_name);
  }
  for (const auto& [value, name] : values) ir::take_name(graph, *value, name);
}

}  // namespace

void bind_files(py::module_& module) {
  module.def("give_data", &give_data, py::arg("graph"), py::arg("tensors"),
             "Make initializers of inputs and parameters, unless the graph writes into them.");
  module.def("take_names", &take_names, py::arg("graph"), py::arg("names"),
             "Rename values; other values of these names get names like them.");
  module.def("spell_out", &convert::spell_out, py::arg("graph"), py::arg("max_opset"),
             "Replace ATen nodes by standard ones where there are some; give their number.");
  module.def("separate_names", &ir::separate_names, py::arg("graph"),
             "Give values of bodies of If and Loop names that no value around them has.");
  module.def("expand_sizes", &convert::expand_sizes, py::arg("graph"),
             "Replace torch_ort.Dims nodes by standard ones; give their number.");
}

}  // namespace torch_ort::python
