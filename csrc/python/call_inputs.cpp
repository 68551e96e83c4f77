#include "python/call_inputs.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

// How often a tensor was written to. Tensors of inference mode do not count this.
int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0
                               : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// The value of a number or None; nothing for other objects.
std::optional<c10::IValue> plain_value(py::handle item) {
  if (item.is_none()) return c10::IValue();
  if (PyLong_Check(item.ptr())) return c10::IValue(py::cast<int64_t>(item));
  if (PyFloat_Check(item.ptr())) return c10::IValue(PyFloat_AS_DOUBLE(item.ptr()));
  return std::nullopt;
}

py::object to_python(const c10::IValue& value) {
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  return py::none();
}

}  // namespace

CallInputs::CallInputs(const py::tuple& flat, const std::vector<int>& rewritten, bool holds_all) {
  inputs_.reserve(flat.size());
  for (py::handle item : flat) {
    if (THPVariable_Check(item.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
      const bool may_be_made_for_call = tensor.dim() == 0 && !tensor.requires_grad();
      if (holds_all || may_be_made_for_call) held_.push_back(tensor);
      inputs_.push_back({c10::WeakIValue(tensor), true, version_of(tensor)});
    } else if (const auto value = plain_value(item)) {
      inputs_.push_back({c10::WeakIValue(*value)});
    } else {
      is_complete_ = false;
    }
  }
  if (!is_complete_) return;
  for (const int position : rewritten) inputs_.at(position).version.reset();
}

py::object CallInputs::take(const std::unordered_map<size_t, at::Tensor>& saved) const {
  if (!is_complete_) return py::none();
  py::tuple flat(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto& [held, is_tensor, version] = inputs_[i];
    const c10::IValue value = held.lock();
    if (!is_tensor) {
      flat[i] = to_python(value);
      continue;
    }
    const auto found = saved.find(i);
    if (!value.isTensor() && found == saved.end()) return py::none();
    const at::Tensor tensor = value.isTensor() ? value.toTensor() : found->second;
    if (value.isTensor() && version && version_of(tensor) != *version) return py::none();
    flat[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }
  return flat;
}

}  // namespace torch_ort::python
