#include "python/call_guard.h"

#include "base/error.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using Kind = Expected::Kind;

// The text is made only if the caller asks for it.
template <typename... Parts>
bool fails(std::string* why, const Parts&... parts) {
  if (why) *why = concat(parts...);
  return false;
}

std::string text(py::handle value) { return py::repr(value).cast<std::string>(); }

std::string type_name(PyObject* value) { return Py_TYPE(value)->tp_name; }

py::object item_of(const py::object& container, const py::object& key) {
  if (PyList_Check(container.ptr())) {
    const Py_ssize_t index = PyLong_AsSsize_t(key.ptr());
    if (index == -1 && PyErr_Occurred()) throw py::error_already_set();
    ORT_CHECK(index >= 0, "call guard: index into a list: got ", index);
    if (index >= PyList_GET_SIZE(container.ptr())) return {};
    return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(container.ptr(), index));
  }
  if (PyCell_Check(container.ptr())) {
    return py::reinterpret_borrow<py::object>(PyCell_GET(container.ptr()));
  }
  PyObject* found = PyDict_GetItemWithError(container.ptr(), key.ptr());
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

bool equal(PyObject* a, PyObject* b) {
  const int result = PyObject_RichCompareBool(a, b, Py_EQ);
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

// In Python 1, 1.0 and True are equal, and so are 0.0 and -0.0. A capture must not confuse them.
bool same_constant(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_Check(a)) return same_bits(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
  if (PyComplex_Check(a)) {
    return same_bits(PyComplex_RealAsDouble(a), PyComplex_RealAsDouble(b)) &&
           same_bits(PyComplex_ImagAsDouble(a), PyComplex_ImagAsDouble(b));
  }
  if (PyList_CheckExact(a) || PyTuple_CheckExact(a)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(a);
    if (size != PySequence_Fast_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!same_constant(PySequence_Fast_GET_ITEM(a, i), PySequence_Fast_GET_ITEM(b, i))) {
        return false;
      }
    }
    return true;
  }
  if (PyDict_CheckExact(a)) {
    if (PyDict_Size(a) != PyDict_Size(b)) return false;
    Py_ssize_t in_a = 0, in_b = 0;
    PyObject *key_a = nullptr, *key_b = nullptr, *value_a = nullptr, *value_b = nullptr;
    while (PyDict_Next(a, &in_a, &key_a, &value_a) && PyDict_Next(b, &in_b, &key_b, &value_b)) {
      if (!same_constant(key_a, key_b) || !same_constant(value_a, value_b)) return false;
    }
    return true;
  }
  return equal(a, b);
}

bool same_order(PyObject* mapping, const std::vector<py::object>& keys) {
  size_t i = 0;
  if (PyDict_CheckExact(mapping)) {
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(mapping, &position, &key, &value)) {
      if (i == keys.size() || !equal(key, keys[i++].ptr())) return false;
    }
  } else {
    for (py::handle key : py::iter(mapping)) {
      if (i == keys.size() || !equal(key.ptr(), keys[i++].ptr())) return false;
    }
  }
  return i == keys.size();
}

bool has_plain_layout(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized();
}

// Whether dim `a` lies outside of dim `b`: 1, inside of it: -1, or neither is known: 0.
int is_outside(const at::Tensor& tensor, int64_t a, int64_t b) {
  const int64_t stride_a = tensor.stride(a), stride_b = tensor.stride(b);
  if (stride_a == 0 || stride_b == 0) return 0;
  if (stride_a != stride_b) return stride_a > stride_b ? 1 : -1;
  return tensor.size(a) > tensor.size(b) ? 1 : 0;
}

bool is_order_of(int64_t num_dims, std::vector<int64_t> order) {
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < static_cast<int64_t>(order.size()); ++i) {
    if (order[i] != i) return false;
  }
  return static_cast<int64_t>(order.size()) == num_dims;
}

bool lies_in(const at::Tensor& tensor, const std::vector<int64_t>& order) {
  return tensor.numel() == 0 || memory_order(tensor) == order;
}

// The tensor itself if it is dense in this order of dims, else a copy.
at::Tensor dense_in(const at::Tensor& tensor, const std::vector<int64_t>& order) {
  if (order.empty()) return tensor.contiguous();
  const at::Tensor rows = tensor.permute(order);
  if (rows.is_contiguous()) return tensor;
  std::vector<int64_t> inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<int64_t>(i);
  return rows.contiguous().permute(inverse);
}

Expected expected_from(py::handle description) {
  const auto parts = py::reinterpret_borrow<py::tuple>(description);
  const auto kind = parts[0].cast<std::string>();
  if (kind == "tensor") {
    const auto num_dims = parts[3].cast<int64_t>();
    auto order = parts[5].cast<std::vector<int64_t>>();
    ORT_CHECK(order.empty() || is_order_of(num_dims, order), "call guard: order of ", num_dims,
              " dims: got ", at::IntArrayRef(order));
    return {.kind = Kind::kTensor,
            .dtype = parts[1].cast<at::ScalarType>(),
            .device = parts[2].cast<at::Device>(),
            .num_dims = num_dims,
            .requires_grad = parts[4].cast<bool>(),
            .order = std::move(order)};
  }
  if (kind == "integer") return {.kind = Kind::kInteger};
  if (kind == "number") {
    return {.kind = Kind::kNumber, .dtype = parts[1].cast<at::ScalarType>()};
  }
  if (kind == "constant") return {.kind = Kind::kConstant, .value = parts[1]};
  ORT_CHECK(kind == "sequence" || kind == "named" || kind == "mapping" || kind == "attributes",
            "call guard: kind of a description: got '", kind, "'");
  ORT_CHECK(parts.size() == 4, "call guard: description of a ", kind, ": got ", parts.size(),
            " parts, want 4");
  Expected expected{.kind = kind == "sequence"  ? Kind::kSequence
                            : kind == "named"   ? Kind::kNamed
                            : kind == "mapping" ? Kind::kMapping
                                                : Kind::kAttributes,
                    .type = parts[1]};
  if (kind != "sequence") {
    for (py::handle key : parts[2]) {
      expected.keys.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (py::handle part : parts[3]) expected.parts.push_back(expected_from(part));
  ORT_CHECK(kind == "sequence" || expected.keys.size() == expected.parts.size(),
            "call guard: description of a ", kind, ": got ", expected.keys.size(), " keys for ",
            expected.parts.size(), " parts");
  return expected;
}

}  // namespace

// An insertion sort from the innermost dim, in which pairs that strides do not decide stay.
std::vector<int64_t> memory_order(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return {};
  const int64_t rank = tensor.dim();
  std::vector<int64_t> inner_first(rank);
  for (int64_t i = 0; i < rank; ++i) inner_first[i] = rank - 1 - i;
  for (int64_t i = 1; i < rank; ++i) {
    int64_t at = i;
    for (int64_t other = i - 1; other >= 0; --other) {
      const int outside = is_outside(tensor, inner_first[other], inner_first[at]);
      if (outside < 0) break;
      if (outside == 0) continue;
      std::swap(inner_first[other], inner_first[at]);
      at = other;
    }
  }
  std::reverse(inner_first.begin(), inner_first.end());
  if (std::is_sorted(inner_first.begin(), inner_first.end())) return {};
  return inner_first;
}

Modes Modes::now() {
  at::Context& context = at::globalContext();
  return {.grad = at::GradMode::is_enabled(),
          .inference = c10::InferenceMode::is_enabled(),
          .deterministic = context.deterministicAlgorithms(),
          .autocast_cpu = at::autocast::is_autocast_enabled(at::kCPU),
          .autocast_cuda = at::autocast::is_autocast_enabled(at::kCUDA),
          .autocast_cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU),
          .autocast_cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA),
          .autocast_cache = at::autocast::is_autocast_cache_enabled(),
          .default_dtype = c10::get_default_dtype_as_scalartype(),
          .attention = {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(),
                        context.userEnabledMathSDP(), context.userEnabledCuDNNSDP(),
                        context.userEnabledOverrideableSDP()},
          .attention_order = context.sDPPriorityOrder()};
}

// The values that a call passes to the graph, in the order of its arguments.
struct CallGuard::Call {
  std::vector<py::object> integers;
  std::vector<py::object> state;
  std::vector<py::object> tensors;
  // Whether tensors that are not dense are copied.
  bool is_copied = true;
};

CallGuard::Place::Place(py::object container_, py::object key_)
    : container(std::move(container_)), key(std::move(key_)) {
  if (!py::isinstance<ScriptObject>(container)) return;
  script = container.cast<ScriptObject>();
  const bool is_part = PyTuple_Check(key.ptr());
  if (is_part) index = key.cast<py::tuple>()[1].cast<size_t>();
  const auto name = is_part ? py::object(key.cast<py::tuple>()[0]) : key;
  const auto found = script->slot(name.cast<std::string>());
  ORT_CHECK(found, "call guard: no attribute ", text(key));
  slot = *found;
}

py::object CallGuard::Place::item() const {
  if (!script) return item_of(container, key);
  return index ? script->part(slot, *index) : script->at(slot);
}

CallGuard::CallGuard(py::handle inputs, const py::list& state, const py::list& reads)
    : modes_(Modes::now()) {
  const auto both = py::reinterpret_borrow<py::tuple>(inputs);
  args_ = expected_from(both[0]);
  kwargs_ = expected_from(both[1]);
  for (py::handle row : state) {
    const auto parts = py::reinterpret_borrow<py::tuple>(row);
    slots_.push_back({{parts[0], parts[1]}, parts[2].cast<size_t>()});
    const Slot& slot = slots_.back();
    ORT_CHECK(slot.position <= facts_.size(), "call guard: position ", slot.position, " of ",
              facts_.size());
    if (slot.position < facts_.size()) continue;
    const py::object held = slot.place.item();
    ORT_CHECK(held && THPVariable_Check(held.ptr()), "call guard: no tensor at ",
              text(slot.place.key));
    const at::Tensor& tensor = THPVariable_Unpack(held.ptr());
    facts_.push_back({py::type::of(held), tensor.scalar_type(), tensor.device(),
                      tensor.requires_grad(), tensor.sizes().vec(), tensor.strides().vec()});
  }
  for (py::handle row : reads) {
    const auto parts = py::reinterpret_borrow<py::tuple>(row);
    const auto how = parts[2].cast<std::string>();
    Read read{.place = {parts[0], parts[1]},
              .how = how == "is"       ? Read::How::kIs
                     : how == "equals" ? Read::How::kEquals
                     : how == "absent" ? Read::How::kAbsent
                     : how == "size"   ? Read::How::kSize
                                       : Read::How::kItems,
              .value = parts[3],
              .words = parts[4].cast<std::string>()};
    ORT_CHECK(how == "items" || read.how != Read::How::kItems, "call guard: how to compare: got '",
              how, "'");
    if (read.place.script && py::isinstance<ScriptObject>(read.value)) {
      read.object = read.value.cast<ScriptObject>();
    }
    if (read.how == Read::How::kSize) read.size = read.value.cast<Py_ssize_t>();
    if (read.how == Read::How::kItems) {
      for (py::handle part : read.value) {
        read.items.push_back(py::reinterpret_borrow<py::object>(part));
      }
    }
    reads_.push_back(std::move(read));
  }
}

bool CallGuard::reads_hold(std::string* why) const {
  for (const Read& read : reads_) {
    // A script object that is an attribute of another one.
    if (read.object) {
      if (read.place.script->holds(read.place.slot, *read.object)) continue;
      return fails(why, read.words, " has changed");
    }
    if (read.how == Read::How::kSize && read.place.script) {
      const py::object value = read.place.item();
      if (PyList_Check(value.ptr()) && PyList_GET_SIZE(value.ptr()) == read.size) continue;
      return fails(why, read.words, " has changed");
    }
    const bool is_size = read.how == Read::How::kSize;
    const py::object found = is_size ? py::object() : read.place.item();
    PyObject* value = found.ptr();
    bool holds = false;
    switch (read.how) {
      case Read::How::kSize: {
        PyObject* container = read.place.container.ptr();
        holds = (PyDict_Check(container) ? PyDict_Size(container) : PyObject_Size(container)) ==
                read.size;
        break;
      }
      case Read::How::kAbsent: holds = !value; break;
      case Read::How::kIs: holds = value == read.value.ptr(); break;
      case Read::How::kEquals: holds = value && same_constant(value, read.value.ptr()); break;
      case Read::How::kItems: {
        // The values of a dict are compared by identity.
        holds = value && PyDict_Check(value) &&
                PyDict_Size(value) == static_cast<Py_ssize_t>(read.items.size());
        Py_ssize_t position = 0;
        PyObject *key = nullptr, *part = nullptr;
        for (size_t i = 0; holds && PyDict_Next(value, &position, &key, &part); ++i) {
          holds = part == read.items[i].ptr();
        }
      }
    }
    if (!holds) {
      return fails(why, read.words, " has changed",
                   why && value && read.how == Read::How::kEquals
                       ? concat(" from ", text(read.value), " to ", text(value))
                       : std::string());
    }
  }
  return true;
}

bool CallGuard::state_holds(Call& call, std::string* why) const {
  call.state.reserve(facts_.size());
  for (const Slot& slot : slots_) {
    py::object found = slot.place.item();
    PyObject* value = found.ptr();
    if (slot.position < call.state.size()) {
      if (value == call.state[slot.position].ptr()) continue;
      return fails(why, "tensor ", text(slot.place.key), " of the module is shared no more");
    }
    const TensorFacts& facts = facts_[slot.position];
    // While another thread captures the module, this place may hold tensors of the trace.
    if (!value || reinterpret_cast<PyObject*>(Py_TYPE(value)) != facts.type.ptr()) {
      return fails(why, "tensor ", text(slot.place.key), " of the module is gone");
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (tensor.scalar_type() != facts.dtype || tensor.device() != facts.device ||
        tensor.requires_grad() != facts.requires_grad || tensor.sizes() != facts.sizes ||
        tensor.strides() != facts.strides) {
      return fails(why, "tensor ", text(slot.place.key),
                   " of the module has another dtype, device, shape or requires_grad");
    }
    call.state.push_back(std::move(found));
  }
  return true;
}

bool CallGuard::fits(const Expected& expected, PyObject* value, const std::string& where,
                     Call& call, std::string* why) const {
  switch (expected.kind) {
    case Kind::kTensor: {
      if (!THPVariable_Check(value)) {
        return fails(why, where, ": got ", type_name(value), ", captured with a tensor");
      }
      const at::Tensor& tensor = THPVariable_Unpack(value);
      if (tensor.scalar_type() != expected.dtype || tensor.device() != expected.device ||
          tensor.dim() != expected.num_dims || !has_plain_layout(tensor)) {
        return fails(why, where, ": another dtype, device, layout or number of dims");
      }
      if (modes_.grad && tensor.requires_grad() != expected.requires_grad) {
        return fails(why, where, ": requires_grad has changed");
      }
      if (!THPVariable_CheckExact(value)) {
        return fails(why, where, ": got the tensor subclass ", type_name(value));
      }
      if (!lies_in(tensor, expected.order)) {
        return fails(why, where, ": its dims lie in another order in memory");
      }
      for (int64_t size : tensor.sizes()) call.integers.push_back(py::int_(size));
      // No graph is captured for tensors that are not dense. As in ONNX Runtime Training, they are
      // copied.
      const at::Tensor dense = call.is_copied ? dense_in(tensor, expected.order) : tensor;
      call.tensors.push_back(dense.is_same(tensor) ? py::reinterpret_borrow<py::object>(value)
                                                   : py::cast(dense));
      return true;
    }
    case Kind::kInteger:
      if (!PyLong_CheckExact(value)) {
        return fails(why, where, ": got ", type_name(value), ", captured with an integer");
      }
      call.integers.push_back(py::reinterpret_borrow<py::object>(value));
      return true;
    case Kind::kNumber: {
      const bool is_float = at::isFloatingType(expected.dtype);
      if (is_float ? !PyFloat_CheckExact(value) : !PyLong_CheckExact(value)) {
        return fails(why, where, ": got ", type_name(value), ", captured with ",
                     is_float ? "a float" : "an integer");
      }
      at::Scalar number;
      if (is_float) {
        number = PyFloat_AS_DOUBLE(value);
      } else {
        int overflow = 0;
        const int64_t integer = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) return fails(why, where, ": an integer of more than 64 bits");
        number = integer;
      }
      call.tensors.push_back(py::cast(at::scalar_tensor(number, at::dtype(expected.dtype))));
      return true;
    }
    case Kind::kConstant:
      if (same_constant(value, expected.value.ptr())) return true;
      return fails(why, where, ": got ", why ? text(value) : "", ", captured with ",
                   why ? text(expected.value) : "");
    default: break;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != expected.type.ptr()) {
    return fails(why, where, ": got ", type_name(value), ", captured with ",
                 why ? text(expected.type) : "");
  }
  const auto count = static_cast<Py_ssize_t>(expected.parts.size());
  if (expected.kind != Kind::kAttributes) {
    const Py_ssize_t size = PyObject_Size(value);
    if (size < 0) throw py::error_already_set();
    if (size != count) return fails(why, where, ": got ", size, " parts, captured with ", count);
  }
  // What forward computes from a mapping may depend on the order of its keys.
  if (expected.kind == Kind::kMapping && !same_order(value, expected.keys)) {
    return fails(why, where, ": other keys, or in another order");
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    py::object part;
    if (expected.kind == Kind::kSequence) {
      part = py::reinterpret_steal<py::object>(PySequence_GetItem(value, i));
    } else if (expected.kind == Kind::kAttributes) {
      part = py::reinterpret_steal<py::object>(PyObject_GetAttr(value, expected.keys[i].ptr()));
    } else if (PyDict_Check(value)) {
      part = py::reinterpret_borrow<py::object>(
          PyDict_GetItemWithError(value, expected.keys[i].ptr()));
    } else {
      part = py::reinterpret_steal<py::object>(PyObject_GetItem(value, expected.keys[i].ptr()));
      if (!part && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
    }
    if (!part) {
      if (PyErr_Occurred()) throw py::error_already_set();
      return fails(why, where, ": has no ", why ? text(expected.keys[i]) : "");
    }
    std::string inner;
    if (why) {
      const bool is_sequence = expected.kind == Kind::kSequence;
      inner = concat(where, "[", is_sequence ? std::to_string(i) : text(expected.keys[i]), "]");
    }
    if (!fits(expected.parts[i], part.ptr(), inner, call, why)) return false;
  }
  return true;
}

bool CallGuard::all_holds(const py::tuple& args, const py::dict& kwargs, Call& call,
                          std::string* why) const {
  if (!(Modes::now() == modes_)) {
    return fails(why,
                 "grad mode, inference mode, autocast, deterministic algorithms, the default dtype "
                 "or the kernels allowed for attention have changed");
  }
  return fits(args_, args.ptr(), "args", call, why) &&
         fits(kwargs_, kwargs.ptr(), "kwargs", call, why) && state_holds(call, why) &&
         reads_hold(why);
}

py::object CallGuard::match(const py::tuple& args, const py::dict& kwargs) const {
  Call call;
  if (!all_holds(args, kwargs, call, nullptr)) return py::none();
  py::list flat(call.integers.size() + call.state.size() + call.tensors.size());
  Py_ssize_t position = 0;
  for (py::object& value : call.integers) {
    PyList_SET_ITEM(flat.ptr(), position++, value.release().ptr());
  }
  for (py::object& value : call.state) {
    PyList_SET_ITEM(flat.ptr(), position++, value.release().ptr());
  }
  for (py::object& value : call.tensors) {
    PyList_SET_ITEM(flat.ptr(), position++, value.release().ptr());
  }
  return flat;
}

py::list CallGuard::tensors(const py::tuple& args, const py::dict& kwargs) const {
  Call call{.is_copied = false};
  const bool fit = fits(args_, args.ptr(), "args", call, nullptr) &&
                   fits(kwargs_, kwargs.ptr(), "kwargs", call, nullptr);
  ORT_CHECK(fit, "call guard: tensors of a call that does not fit");
  return py::cast(call.tensors);
}

std::string CallGuard::mismatch(const py::tuple& args, const py::dict& kwargs) const {
  Call call;
  std::string why;
  all_holds(args, kwargs, call, &why);
  return why;
}

int CallGuard::visit_objects(visitproc visit, void* argument) const {
  const auto walk = [&](const py::object& object) {
    return object ? visit(object.ptr(), argument) : 0;
  };
  const auto walk_place = [&](const Place& place) {
    const int stop = walk(place.container);
    return stop != 0 ? stop : walk(place.key);
  };
  for (const Slot& slot : slots_) {
    if (const int stop = walk_place(slot.place); stop != 0) return stop;
  }
  for (const Read& read : reads_) {
    if (const int stop = walk_place(read.place); stop != 0) return stop;
    if (const int stop = walk(read.value); stop != 0) return stop;
    for (const py::object& item : read.items) {
      if (const int stop = walk(item); stop != 0) return stop;
    }
  }
  return 0;
}

void CallGuard::clear() {
  // Destroying an object may run Python code, which must not find a half-destroyed guard.
  const std::vector<Slot> slots = std::exchange(slots_, {});
  const std::vector<Read> reads = std::exchange(reads_, {});
}

}  // namespace torch_ort::python
