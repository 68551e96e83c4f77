// The flat inputs of one call of a graph, kept so that the call can be run again in eager PyTorch.
#pragma once

#include "run/autograd/companion.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_ort::python {

// Holds weak references to the tensors, so that no memory is kept for a second derivative that
// nobody asks for, unless it is told that somebody will. 0-d tensors, which may have been made for
// the call, are held.
class CallInputs : public run::Companion {
 public:
  // `rewritten`: positions of tensors that may be written into, since nothing depends on what they
  // hold.
  CallInputs(const pybind11::tuple& flat, const std::vector<int>& rewritten, bool holds_all);

  // The inputs as they were passed, or None if one has been freed or written into since. `saved`
  // has, by position, those that autograd saved.
  pybind11::object take(const std::unordered_map<size_t, at::Tensor>& saved) const;

 private:
  struct Input {
    c10::WeakIValue value;
    bool is_tensor = false;
    std::optional<int64_t> version;  // of a tensor that must not be written into
  };

  bool is_complete_ = true;  // all inputs are tensors, numbers or None
  std::vector<Input> inputs_;
  std::vector<at::Tensor> held_;
};

}  // namespace torch_ort::python
