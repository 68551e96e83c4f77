// The guards of a graph captured from a module: whether it is valid for a call, and what inputs the
// graph then gets.
//
// A capture is valid for calls that look like the captured one: arguments of the same structure,
// the same parameters, the same values of the attributes that were read, and the same modes of
// PyTorch. Sizes are not compared here.
#pragma once

#include "python/script_object.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <vector>

namespace torch_ort::python {

// The modes of PyTorch that influence which operators run and what they compute.
struct Modes {
  bool grad;
  bool inference;
  bool deterministic;
  bool autocast_cpu;
  bool autocast_cuda;
  at::ScalarType autocast_cpu_dtype;
  at::ScalarType autocast_cuda_dtype;
  bool autocast_cache;
  at::ScalarType default_dtype;
  // The kernels of attention that are allowed, and which of them is preferred.
  std::array<bool, 5> attention;
  std::array<at::SDPBackend, at::num_sdp_backends> attention_order;

  static Modes now();
  bool operator==(const Modes&) const = default;
};

// What an argument, or a part of one, has to look like.
struct Expected {
  enum class Kind {
    kTensor,
    kInteger,
    kNumber,
    kConstant,
    kSequence,
    kNamed,
    kMapping,
    kAttributes
  };

  Kind kind;
  pybind11::object type;               // for kinds with parts
  pybind11::object value;              // for constants
  std::vector<pybind11::object> keys;  // for mappings, in their order, and for attributes
  std::vector<Expected> parts;
  at::ScalarType dtype = at::kFloat;  // for tensors and numbers
  // The fields below are for tensors.
  at::Device device = at::kCPU;
  int64_t num_dims = 0;
  bool requires_grad = false;
  std::vector<int64_t> order;  // the dims by memory_order
};

// The dims of a tensor in the order in which they lie in memory, outermost first, as PyTorch orders
// those of an elementwise result; empty if this is row-major.
std::vector<int64_t> memory_order(const at::Tensor& tensor);

class CallGuard {
 public:
  // `inputs` describes (args, kwargs) as torch_ort.guards.structure does. `state` lists (dict or
  // list, key, position): where each tensor of the module is found, and its position among the
  // graph's. `reads` lists (dict, key, how, value, words): what the capture read, how to compare it
  // ("is", "equals", "absent", "items", or "size" for the container itself) and how messages name
  // it.
  CallGuard(pybind11::handle inputs, const pybind11::list& state, const pybind11::list& reads);

  // The graph's arguments, if the graph is valid for the call: integers and sizes of tensors, the
  // tensors of the module, the tensors of the call. None if it is not.
  pybind11::object match(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // The tensors of a call for which the graph is valid, as they were passed: tensors that are not
  // dense are not copied.
  pybind11::list tensors(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // Why the graph is not valid for a call, in words; empty if it is.
  std::string mismatch(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // For Python's garbage collector: the values that were read belong to modules, which may hold the
  // graph. Returns 0, or the result of `visit` that ended the walk.
  int visit_objects(visitproc visit, void* argument) const;
  void clear();

 private:
  // Where a value is found: in a dict, a list, the cell of a closure, or an object of TorchScript.
  struct Place {
    pybind11::object container, key;
    std::optional<ScriptObject> script;
    size_t slot = 0;              // in `script`
    std::optional<size_t> index;  // the index in the list at `slot`

    Place(pybind11::object container, pybind11::object key);
    // Returns a null object if there is none.
    pybind11::object item() const;
  };
  struct Slot {
    Place place;
    size_t position;
  };
  struct TensorFacts {
    pybind11::object type;
    at::ScalarType dtype;
    at::Device device;
    bool requires_grad;
    std::vector<int64_t> sizes, strides;
  };
  struct Read {
    enum class How { kIs, kEquals, kAbsent, kItems, kSize };
    Place place;
    How how;
    pybind11::object value;
    std::optional<ScriptObject> object;  // `value`, if it is a TorchScript object
    std::vector<pybind11::object> items;
    Py_ssize_t size = 0;
    std::string words;
  };
  struct Call;

  bool reads_hold(std::string* why) const;
  bool state_holds(Call& call, std::string* why) const;
  bool fits(const Expected& expected, PyObject* value, const std::string& where, Call& call,
            std::string* why) const;
  bool all_holds(const pybind11::tuple& args, const pybind11::dict& kwargs, Call& call,
                 std::string* why) const;

  Modes modes_;
  Expected args_, kwargs_;
  std::vector<Slot> slots_;
  std::vector<TensorFacts> facts_;
  std::vector<Read> reads_;
};

}  // namespace torch_ort::python
