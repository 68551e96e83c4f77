// Whether a graph captured from a module serves a call of it, and what the graph then takes.
//
// A capture holds for calls that look like the one it was made from: arguments of the same
// structure, the same parameters, the same values of what was read from the module's attributes,
// the same modes of PyTorch. Sizes are not compared here.
#pragma once

#include "python/script_object.h"

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace torch_ort::python {

// Modes of PyTorch that decide what operators do, or which are called.
struct Modes {
  bool grad;
  bool inference;
  bool deterministic;
  bool autocast_cpu;
  bool autocast_cuda;
  at::ScalarType autocast_cpu_dtype;
  at::ScalarType autocast_cuda_dtype;
  at::ScalarType default_dtype;

  static Modes now();
  bool operator==(const Modes&) const = default;
};

// What an argument, or a part of one, has to look like.
struct Expected {
  enum class Kind {
    kTensor,
    kInteger,
    kFloat,
    kConstant,
    kSequence,
    kNamed,
    kMapping,
    kAttributes
  };

  Kind kind;
  pybind11::object type;               // of all with parts
  pybind11::object value;              // of constants
  std::vector<pybind11::object> keys;  // of mappings and attributes; of a mapping in their order
  std::vector<Expected> parts;
  at::ScalarType dtype = at::kFloat;  // of tensors and floats
  // From here on: of tensors.
  at::Device device = at::kCPU;
  int64_t num_dims = 0;
  bool requires_grad = false;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

class CallGuard {
 public:
  // `inputs` describes (args, kwargs) as torch_ort.guards.structure does. `state` lists
  // (dict or list, key, position): where each tensor of the module hangs, and which of the graph's
  // it is. `reads` lists (dict, key, how, value, words): what was read, how it is compared ("is",
  // "equals", "absent", "items", or "size": of the container itself) and what it is called.
  CallGuard(pybind11::handle inputs, const pybind11::list& state, const pybind11::list& reads);

  // The graph's arguments: integers and sizes of tensors, the module's tensors, the call's tensors.
  // None if the graph is for other calls.
  pybind11::object match(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // The tensors of a call that fits, as they were given: those that are not dense are no copies.
  pybind11::list tensors(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // What keeps the graph from serving a call, in words; empty if nothing does.
  std::string mismatch(const pybind11::tuple& args, const pybind11::dict& kwargs) const;

  // For Python's collector of cycles: what is read hangs at modules, which may hold the graph. What
  // it calls returns 0, or stops the walk.
  int visit_objects(visitproc visit, void* argument) const;
  void clear();

 private:
  // Where a value hangs: in a dict, a list, a cell of a closure, or an object of TorchScript.
  struct Place {
    pybind11::object container, key;
    std::optional<ScriptObject> script;
    size_t slot = 0;              // in `script`
    std::optional<size_t> index;  // in the list there

    Place(pybind11::object container, pybind11::object key);
    // Null where there is none.
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
    std::optional<ScriptObject> object;  // `value`, if it is one
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
