// An object of TorchScript, most often a module, as a mapping from attribute names to live values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

namespace torch_ort::python {

// Tensors are returned as they are in the object, objects as ScriptObjects, containers as copies.
class ScriptObject {
 public:
  explicit ScriptObject(c10::intrusive_ptr<c10::ivalue::Object> object)
      : object_(std::move(object)) {}

  // Unwraps torch's Python object. Throws InternalError for anything else.
  static ScriptObject of(pybind11::handle wrapper);

  const c10::intrusive_ptr<c10::ivalue::Object>& object() const { return object_; }
  std::vector<std::string> names() const;
  std::optional<size_t> slot(const std::string& name) const;
  pybind11::object at(size_t slot) const;
  bool holds(size_t slot, const ScriptObject& other) const;
  // Throws UserError for a value of another type.
  void set(const std::string& name, pybind11::handle value);

  // The tensors in an attribute that is a list. part() returns a null object if there is none at
  // `index`; set_part() throws InternalError.
  size_t num_tensors(size_t slot) const;
  pybind11::object part(size_t slot, size_t index) const;
  void set_part(const std::string& name, size_t index, const at::Tensor& value);

 private:
  c10::intrusive_ptr<c10::ivalue::Object> object_;
};

// Converts a value of TorchScript to the Python object described above.
pybind11::object script_value(const c10::IValue& value);

}  // namespace torch_ort::python
