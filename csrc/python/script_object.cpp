#include "python/script_object.h"

#include "base/error.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace torch_ort::python {

namespace jit = torch::jit;

ScriptObject ScriptObject::of(py::handle wrapper) {
  if (py::isinstance<ScriptObject>(wrapper)) return wrapper.cast<ScriptObject>();
  if (py::isinstance<jit::Object>(wrapper)) {
    return ScriptObject(wrapper.cast<jit::Object>()._ivalue());
  }
  if (const auto module = jit::as_module(wrapper)) return ScriptObject(module->_ivalue());
  if (const auto object = jit::as_object(wrapper)) return ScriptObject(object->_ivalue());
  throw InternalError(
      concat("want an object of TorchScript, got a ", Py_TYPE(wrapper.ptr())->tp_name));
}

std::vector<std::string> ScriptObject::names() const {
  std::vector<std::string> names;
  for (const c10::ClassAttribute& attribute : object_->type()->getAttributes()) {
    names.push_back(attribute.getName());
  }
  return names;
}

std::optional<size_t> ScriptObject::slot(const std::string& name) const {
  return object_->type()->findAttributeSlot(name);
}

py::object ScriptObject::at(size_t slot) const { return script_value(object_->getSlot(slot)); }

bool ScriptObject::holds(size_t slot, const ScriptObject& other) const {
  const c10::IValue& value = object_->getSlot(slot);
  return value.isObject() && &value.toObjectRef() == other.object_.get();
}

void ScriptObject::set(const std::string& name, py::handle value) {
  const c10::TypePtr type = object_->type()->findAttribute(name);
  if (!type) throw UserError(concat("TorchScript: no attribute '", name, "'"));
  if (py::isinstance<ScriptObject>(value)) {
    const auto child = value.cast<ScriptObject>().object_;
    ORT_CHECK(child->type()->isSubtypeOf(*type), "torchscript: attribute '", name, "': got a ",
              child->type()->str(), ", want a ", type->str());
    object_->setAttr(name, child);
    return;
  }
  try {
    object_->setAttr(name, jit::toIValue(value, type));
  } catch (const py::cast_error& error) {
    throw UserError(concat("TorchScript: attribute '", name, "': ", error.what()));
  }
}

size_t ScriptObject::num_tensors(size_t slot) const {
  const c10::IValue& value = object_->getSlot(slot);
  return value.isTensorList() ? value.toListRef().size() : 0;
}

py::object ScriptObject::part(size_t slot, size_t index) const {
  if (index >= num_tensors(slot)) return {};
  return script_value(object_->getSlot(slot).toListRef()[index]);
}

void ScriptObject::set_part(const std::string& name, size_t index, const at::Tensor& value) {
  const auto found = slot(name);
  ORT_CHECK(found && index < num_tensors(*found), "torchscript: no tensor ", index, " in '", name,
            "'");
  c10::List<c10::IValue> list = object_->getSlot(*found).toList();  // this shares the elements
  list.set(index, value);
}

py::object script_value(const c10::IValue& value) {
  // The most frequent types come first, since guards run at every call.
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isTensor() && value.toTensor().defined()) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  }
  if (value.isObject() && !value.isCustomClass()) return py::cast(ScriptObject(value.toObject()));
  return jit::toPyObject(value);
}

}  // namespace torch_ort::python
