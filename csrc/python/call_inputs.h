// The flat inputs of one call of a graph, for running the call again in eager PyTorch.
#pragma once

#include "run/companion.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torch_ort::python {

// Tensors live as long as others hold them, and no longer: nothing is kept in memory for a second
// derivative that nobody asks for. Those without dims, which may be made for the call, are held.
class CallInputs : public run::Companion {
 public:
  explicit CallInputs(const pybind11::tuple& flat);

  // The inputs as they were given, or None if one is gone, or was written into since. `saved` has
  // what autograd has saved of them, by position.
  pybind11::object take(const std::unordered_map<size_t, at::Tensor>& saved) const;

 private:
  struct Input {
    c10::WeakIValue value;
    int64_t version = -1;  // of a tensor
  };

  bool is_complete_ = true;  // all are tensors, numbers and None
  std::vector<Input> inputs_;
  std::vector<at::Tensor> held_;
};

}  // namespace torch_ort::python
