// Recorded steps as Python calls them, and what of theirs enters the interpreter.
#include "base/error.h"
#include "python/bind.h"
#include "python/call_inputs.h"
#include "python/shared_object.h"
#include "python/torch_errors.h"
#include "run/autograd/autograd_errors.h"
#include "run/autograd/recorded_step.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using run::RecordedStep;
using run::Session;
using Order = RecordedStep::Order;
using Tensors = RecordedStep::Tensors;

// Undefined tensors become None.
py::list to_python(const Tensors& tensors) {
  py::list items;
  for (const at::Tensor& tensor : tensors) {
    items.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  }
  return items;
}

Tensors from_python(const py::object& items) {
  Tensors tensors;
  for (py::handle item : items) {
    tensors.push_back(item.is_none() ? at::Tensor() : item.cast<at::Tensor>());
  }
  return tensors;
}

// The function that computes gradients with a history: `function(key of the step, inputs of the
// call, tangents, compute)`.
py::object& differentiable_gradients() {
  // Never destroyed, because Python frees objects that need it at its end.
  static py::object* function = new py::object;
  return *function;
}

// The function that computes gradients in another autocast state, or of batched tangents:
// `function(key of the step, inputs of the call, token, tangents, are_batched)`.
py::object& other_backward() {
  static py::object* function = new py::object;
  return *function;
}

// The flat inputs of the call, or None if they are not available.
py::object take_inputs(const run::KnownCall& call) {
  if (call.companion == nullptr) return py::none();
  return static_cast<const CallInputs&>(*call.companion).take(call.saved);
}

Tensors call_differentiable_gradients(const run::KnownCall& call,
                                      c10::function_ref<Tensors()> compute) {
  const py::gil_scoped_acquire gil;
  const auto compute_here = py::cpp_function([compute] {
    return to_python(with_torch_errors([compute] {
      const py::gil_scoped_release release;
      return compute();
    }));
  });
  return from_python(differentiable_gradients()(call.key, take_inputs(call),
                                                to_python(call.tangents), compute_here));
}

Tensors call_other_backward(const run::KnownCall& call) {
  const py::gil_scoped_acquire gil;
  return from_python(other_backward()(call.key, take_inputs(call), call.token,
                                      to_python(call.tangents), call.are_batched));
}

std::vector<run::AutocastState> states_from(
    const std::vector<std::vector<std::pair<std::string, at::ScalarType>>>& given) {
  std::vector<run::AutocastState> states;
  for (const auto& kinds : given) {
    run::AutocastState& state = states.emplace_back();
    for (const auto& [device, dtype] : kinds) state.emplace_back(at::Device(device).type(), dtype);
  }
  return states;
}

std::exception_ptr as_python_error(std::exception_ptr ours) {
  const py::gil_scoped_acquire gil;
  set_error_of_ours(std::move(ours));
  return std::make_exception_ptr(py::error_already_set());
}

std::vector<int64_t> saved_positions(const Session& session,
                                     const std::vector<int>& tensor_inputs) {
  std::vector<int64_t> positions;
  for (int index : session.saved_inputs()) positions.push_back(tensor_inputs[index]);
  return positions;
}

// A step that takes the flat inputs of a call.
class FlatStep {
 public:
  FlatStep(const std::shared_ptr<Session>& session, std::vector<int> tensor_inputs,
           std::vector<int> symbol_inputs, std::vector<int> with_gradient,
           std::vector<int> differentiable, std::vector<int> rewritten, std::vector<Order> orders,
           std::vector<std::vector<int64_t>> origins, int64_t key, bool always_early,
           const std::vector<std::tuple<int, int64_t, at::ScalarType>>& lazy,
           const std::vector<std::vector<std::pair<std::string, at::ScalarType>>>& states)
      : step_(session,
              {.differentiable = std::move(differentiable),
               .orders = std::move(orders),
               .origins = std::move(origins),
               .always_early = always_early,
               .saved_positions = saved_positions(*session, tensor_inputs),
               .lazy = lazy_outputs(lazy),
               .states = states_from(states)},
              key),
        num_outputs_(session->num_outputs()),
        tensor_inputs_(std::move(tensor_inputs)),
        symbol_inputs_(std::move(symbol_inputs)),
        with_gradient_(std::move(with_gradient)),
        rewritten_(std::move(rewritten)) {}

  // `function(token, saved, tangents)`
  void watch_first_backward(py::object function) {
    step_.watch_first_backward(
        [held = shared_object(std::move(function))](const at::Tensor& token, const Tensors& saved,
                                                    const Tensors& tangents) {
          const py::gil_scoped_acquire gil;
          return from_python((*held)(token, saved, tangents));
        });
  }

  void forget_first_backward() { step_.forget_first_backward(); }

  void hold_inputs() { holds_inputs_ = true; }

  py::list call(const py::tuple& flat, bool packs) const {
    const Tensors inputs = tensors_at(flat, tensor_inputs_);
    const Tensors with_gradient = tensors_at(flat, with_gradient_);
    std::vector<int64_t> symbols;
    for (int i : symbol_inputs_) symbols.push_back(py::cast<int64_t>(flat[i]));
    return with_errors_of_calls([&] {
      Tensors results;
      {
        const py::gil_scoped_release release;
        results = step_.run(inputs, symbols, with_gradient, packs);
      }
      run::keep_beside(results[num_outputs_],
                       std::make_shared<CallInputs>(flat, rewritten_, holds_inputs_));
      return to_python(results);
    });
  }

 private:
  static std::vector<RecordedStep::Lazy> lazy_outputs(
      const std::vector<std::tuple<int, int64_t, at::ScalarType>>& given) {
    std::vector<RecordedStep::Lazy> made;
    for (const auto& [output, classes, dtype] : given) made.push_back({output, classes, dtype});
    return made;
  }

  // An effect token is None when the graph runs; it becomes an undefined tensor.
  static Tensors tensors_at(const py::tuple& flat, const std::vector<int>& positions) {
    Tensors tensors;
    tensors.reserve(positions.size());
    for (int position : positions) {
      PyObject* item = PyTuple_GetItem(flat.ptr(), position);
      if (item == nullptr) throw py::error_already_set();
      if (item == Py_None) {
        tensors.emplace_back();
        continue;
      }
      ORT_CHECK(THPVariable_Check(item), "recorded step: input ", position, " is no tensor");
      tensors.push_back(THPVariable_Unpack(item));
    }
    return tensors;
  }

  RecordedStep step_;
  bool holds_inputs_ = false;
  size_t num_outputs_;
  // Positions among the flat inputs.
  std::vector<int> tensor_inputs_, symbol_inputs_, with_gradient_, rewritten_;
};

}  // namespace

void bind_step(py::module_& module) {
  run::set_differentiable_gradients(&call_differentiable_gradients);
  run::set_other_backward(&call_other_backward);
  run::as_python_error = &as_python_error;
  py::class_<FlatStep>(module, "RecordedStep")
      .def(py::init<const std::shared_ptr<Session>&, std::vector<int>, std::vector<int>,
                    std::vector<int>, std::vector<int>, std::vector<int>, std::vector<Order>,
                    std::vector<std::vector<int64_t>>, int64_t, bool,
                    const std::vector<std::tuple<int, int64_t, at::ScalarType>>&,
                    const std::vector<std::vector<std::pair<std::string, at::ScalarType>>>&>(),
           py::arg("session"), py::arg("tensor_inputs"), py::arg("symbol_inputs"),
           py::arg("with_gradient"), py::arg("differentiable"), py::arg("rewritten"),
           py::arg("orders"), py::arg("origins"), py::arg("key"), py::arg("always_early") = false,
           py::arg("lazy") = std::vector<std::tuple<int, int64_t, at::ScalarType>>(),
           py::arg("states") = std::vector<std::vector<std::pair<std::string, at::ScalarType>>>{{}})
      .def("watch_first_backward", &FlatStep::watch_first_backward)
      .def("forget_first_backward", &FlatStep::forget_first_backward)
      .def("hold_inputs", &FlatStep::hold_inputs,
           "Hold the inputs of each later call until it ends, for what runs it again.")
      .def("__call__", &FlatStep::call,
           "Run forward on a tuple of flat inputs; give the session's outputs, the token, and the "
           "rows "
           "in the places of lazy outputs.");
  module.def(
      "set_differentiable_gradients",
      [](py::object function) { differentiable_gradients() = std::move(function); },
      "Set what makes gradients that can be differentiated: a function of a step's key, the flat "
      "inputs of a call (None if they are gone), its tangents, and what computes the gradients.");
  module.def(
      "set_other_backward", [](py::object function) { other_backward() = std::move(function); },
      "Set what computes gradients of batched tangents, or in an autocast state for which a step "
      "was not recorded: a function of its key, the flat inputs of a call (None if they are gone), "
      "its token, its tangents, and whether they are batched.");
  module.def(
      "are_batched",
      [](const py::iterable& gradients) {
        return run::are_batched(from_python(py::list(gradients)));
      },
      "Tell whether one of the gradients stands for a batch in a transform.");
}

}  // namespace torch_ort::python
