// A recorded training graph as one node of autograd.
//
// What backward reads is saved as autograd saves: edits are noticed, hooks are called, and the
// token ends the engine's context with the node. Everything else that backward wants is data in the
// node, so that a trace of backward (compiled autograd) can hold it.
#include "python/bind.h"
#include "python/call_inputs.h"
#include "python/torch_errors.h"
#include "run/session.h"

#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace torch_ort::python {

namespace {

using run::Session;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = Session::Tensors;
using Order = std::vector<int64_t>;  // dims by strides, outermost first; empty: row-major

constexpr const char* kIsDeterministic = "is_deterministic";
constexpr const char* kOrders = "orders";
constexpr const char* kOrigins = "origins";
constexpr const char* kFirstBackward = "first_backward";
constexpr const char* kKey = "key";
constexpr const char* kSavedPositions = "saved_positions";

// What runs backward until the engine's has succeeded once: `function(token, saved, tangents)`.
struct FirstBackwards {
  std::mutex mutex;
  std::unordered_map<int64_t, py::object> functions;
  int64_t next_key = 1;
};

FirstBackwards& first_backwards() {
  static FirstBackwards* table = new FirstBackwards;  // outlives what Python frees at its end
  return *table;
}

// Nothing once its step is gone, or proven.
py::object find_first_backward(int64_t key) {
  FirstBackwards& table = first_backwards();
  std::lock_guard lock(table.mutex);
  auto found = table.functions.find(key);
  return found == table.functions.end() ? py::object() : found->second;
}

// What makes gradients that can be differentiated: `function(key of the step, inputs of the call,
// tangents, compute)`.
py::object& differentiable_gradients() {
  static py::object* function = new py::object;  // outlives what Python frees at its end
  return *function;
}

// An undefined tensor is None.
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

struct Backward {
  int64_t watched;  // key of what runs instead of the engine; 0: nobody watches
  int64_t key;      // of the step
  at::Tensor token;
  Tensors saved;
  c10::List<int64_t> saved_positions;  // among the flat inputs, of the first in `saved`
  Tensors tangents;

  Tensors run() const {
    std::optional<Tensors> gradients;
    if (watched != 0) gradients = run_watched();
    return gradients ? *std::move(gradients) : run_engine();
  }

  // Gradients that have a history.
  Tensors run_differentiable() const {
    const py::gil_scoped_acquire gil;
    const auto compute = py::cpp_function([this] {
      return to_python(with_torch_errors([this] {
        const py::gil_scoped_release release;
        return run();
      }));
    });
    return from_python(
        differentiable_gradients()(key, take_inputs(), to_python(tangents), compute));
  }

 private:
  // The flat inputs of the call; None where they are not at hand.
  py::object take_inputs() const {
    const auto companion = std::static_pointer_cast<CallInputs>(run::kept_beside(token));
    if (companion == nullptr) return py::none();
    std::unordered_map<size_t, at::Tensor> by_position;
    for (size_t i = 0; i < saved_positions.size(); ++i) by_position[saved_positions[i]] = saved[i];
    return companion->take(by_position);
  }

  std::optional<Tensors> run_watched() const {
    const py::gil_scoped_acquire gil;
    const py::object function = find_first_backward(watched);
    if (!function) return std::nullopt;
    return from_python(function(token, saved, tangents));
  }

  Tensors run_engine() const {
    RECORD_FUNCTION("torch_ort::run_backward", c10::ArrayRef<const c10::IValue>{});
    return with_our_errors([&] {
      // Outside a backward pass autograd says "keep", the safe answer.
      const bool keep = torch::autograd::get_current_graph_task_keep_graph();
      return Session::backward(token, saved, tangents, keep);
    });
  }
};

// A gradient that comes back, in the layout that the graph was recorded for.
at::Tensor in_order(const at::Tensor& gradient, const c10::List<int64_t>& order) {
  if (!gradient.defined()) return gradient;
  if (order.empty()) return gradient.contiguous();
  const Order dims = order.vec();
  const at::Tensor rows = gradient.permute(dims);
  if (rows.is_contiguous()) return gradient;
  Order inverse(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) inverse[dims[i]] = static_cast<int64_t>(i);
  return rows.contiguous().permute(inverse);
}

// Whether anybody waits for a gradient, and would be called with none.
bool has_hooks(torch::autograd::Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}

// One forward call, besides the inputs that get gradients.
struct Call {
  std::shared_ptr<Session> session;
  Tensors inputs;
  std::vector<int64_t> symbols;
  bool carry = false;
  const std::vector<int>& differentiable;
  const c10::List<c10::List<int64_t>>& orders;
  const c10::List<c10::List<int64_t>>& origins;
  const c10::List<int64_t>& saved_positions;
  int64_t key = 0;             // of the step
  int64_t first_backward = 0;  // a key; 0: nobody watches
  Tensors results;
};

struct Step : torch::autograd::Function<Step> {
  static variable_list forward(AutogradContext* context, Call* call, at::TensorList /*given*/) {
    call->results = call->session->forward(call->inputs, call->symbols, call->carry);
    const Session& session = *call->session;
    variable_list saved{call->results[session.num_outputs()]};
    for (int index : session.saved_inputs()) saved.push_back(call->inputs[index]);
    for (int index : session.saved_outputs()) saved.push_back(call->results[index]);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data[kIsDeterministic] = at::globalContext().deterministicAlgorithms();
    context->saved_data[kOrders] = call->orders;
    context->saved_data[kOrigins] = call->origins;
    context->saved_data[kFirstBackward] = call->first_backward;
    context->saved_data[kKey] = call->key;
    context->saved_data[kSavedPositions] = call->saved_positions;
    variable_list outputs;
    for (int index : call->differentiable) outputs.push_back(call->results[index]);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results{at::Tensor()};  // of the call
    const Backward call = take_apart(context, gradients);
    const bool has_history = at::GradMode::is_enabled();  // create_graph=True
    for (at::Tensor& gradient : has_history ? call.run_differentiable() : call.run()) {
      results.push_back(std::move(gradient));
    }
    const auto is_defined = [](const at::Tensor& gradient) { return gradient.defined(); };
    if (!std::all_of(gradients.begin(), gradients.end(), is_defined)) {
      leave_out(context->saved_data[kOrigins].toList(), gradients, results);
    }
    return results;
  }

 private:
  // As autograd does, which comes to no tensor from an output that nobody has used: no gradient,
  // which is not zeros. Only where a hook waits, it has to be zeros.
  static void leave_out(const c10::List<c10::IValue>& origins, const variable_list& gradients,
                        variable_list& results) {
    const auto node = torch::autograd::get_current_node();
    for (size_t i = 0; i < origins.size(); ++i) {
      const c10::IValue of_one = origins.get(i);
      const c10::List<int64_t> outputs = of_one.toIntList();
      at::Tensor& result = results[i + 1];
      if (std::none_of(outputs.begin(), outputs.end(),
                       [&](int64_t output) { return gradients[output].defined(); })) {
        result.reset();
      }
      const torch::autograd::Edge& edge = node->next_edge(i);
      if (!result.defined() && edge.is_valid() && has_hooks(*edge.function)) {
        result = edge.function->input_metadata(edge.input_nr).zeros_like();
      }
    }
  }

  static Backward take_apart(AutogradContext* context, const variable_list& gradients) {
    // A checkpoint around the step computes forward again in here.
    variable_list saved = context->get_saved_variables();
    TORCH_CHECK(!at::globalContext().deterministicAlgorithms() ||
                    context->saved_data[kIsDeterministic].toBool(),
                "torch_ort: torch.use_deterministic_algorithms was switched on after forward has "
                "run: the backward of that forward may not be deterministic");
    const c10::List<c10::IValue> orders = context->saved_data[kOrders].toList();
    Tensors tangents;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const c10::IValue order = orders.get(i);
      tangents.push_back(in_order(gradients[i], order.toIntList()));
    }
    return {.watched = context->saved_data[kFirstBackward].toInt(),
            .key = context->saved_data[kKey].toInt(),
            .token = saved.front(),
            .saved = Tensors(saved.begin() + 1, saved.end()),
            .saved_positions = context->saved_data[kSavedPositions].toIntList(),
            .tangents = std::move(tangents)};
  }
};

// Flat inputs in, results of the session out, with their history.
class RecordedStep {
 public:
  RecordedStep(std::shared_ptr<Session> session, std::vector<int> tensor_inputs,
               std::vector<int> symbol_inputs, std::vector<int> with_gradient,
               std::vector<int> differentiable, const std::vector<Order>& orders,
               const std::vector<std::vector<int64_t>>& origins, int64_t key)
      : session_(std::move(session)),
        tensor_inputs_(std::move(tensor_inputs)),
        symbol_inputs_(std::move(symbol_inputs)),
        with_gradient_(std::move(with_gradient)),
        differentiable_(std::move(differentiable)),
        key_(key) {
    for (const Order& order : orders) orders_.push_back(c10::List<int64_t>(order));
    for (const auto& outputs : origins) origins_.push_back(c10::List<int64_t>(outputs));
    for (int index : session_->saved_inputs()) saved_positions_.push_back(tensor_inputs_[index]);
  }
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;
  ~RecordedStep() { forget_first_backward(); }

  void watch_first_backward(py::object function) {
    forget_first_backward();
    FirstBackwards& table = first_backwards();
    std::lock_guard lock(table.mutex);
    first_backward_ = table.next_key++;
    table.functions[first_backward_] = std::move(function);
  }

  void forget_first_backward() {
    py::object forgotten;  // freed when nothing is locked any more
    FirstBackwards& table = first_backwards();
    std::lock_guard lock(table.mutex);
    auto found = table.functions.find(first_backward_);
    if (found != table.functions.end()) {
      forgotten = std::move(found->second);
      table.functions.erase(found);
    }
    first_backward_ = 0;
  }

  py::list run(const py::tuple& flat, bool carry) const {
    Call call{.session = session_,
              .carry = carry,
              .differentiable = differentiable_,
              .orders = orders_,
              .origins = origins_,
              .saved_positions = saved_positions_,
              .key = key_,
              .first_backward = first_backward_};
    for (int i : tensor_inputs_) call.inputs.push_back(tensor_at(flat, i));
    for (int i : symbol_inputs_) call.symbols.push_back(py::cast<int64_t>(flat[i]));
    Tensors with_gradient;
    for (int i : with_gradient_) with_gradient.push_back(tensor_at(flat, i));
    return with_errors_of_calls([&] {
      {
        const py::gil_scoped_release release;
        RECORD_FUNCTION("torch_ort::run_forward", c10::ArrayRef<const c10::IValue>{});
        apply(&call, with_gradient);
      }
      run::keep_beside(call.results.back(), std::make_shared<CallInputs>(flat));
      return to_python(call.results);
    });
  }

 private:
  // None, which an effect token is at run time, becomes an undefined tensor.
  static at::Tensor tensor_at(const py::tuple& flat, int position) {
    PyObject* item = PyTuple_GetItem(flat.ptr(), position);
    if (item == nullptr) throw py::error_already_set();
    if (item == Py_None) return {};
    ORT_CHECK(THPVariable_Check(item), "recorded step: input ", position, " is no tensor");
    return THPVariable_Unpack(item);
  }

  void apply(Call* call, const Tensors& with_gradient) const {
    try {
      variable_list made = Step::apply(call, at::TensorList(with_gradient));
      for (size_t i = 0; i < made.size(); ++i) {
        call->results[differentiable_[i]] = std::move(made[i]);
      }
    } catch (...) {
      // A hook has refused what was to be saved: the node holds outputs, which hold the node.
      for (at::Tensor& result : call->results) {
        if (result.defined() && result.grad_fn()) result.detach_();
      }
      throw;
    }
  }

  std::shared_ptr<Session> session_;
  std::vector<int> tensor_inputs_, symbol_inputs_, with_gradient_;  // positions of flat inputs
  std::vector<int> differentiable_;                                 // outputs
  c10::List<c10::List<int64_t>> orders_;                            // of their gradients
  c10::List<c10::List<int64_t>> origins_;  // by gradient: the positions of the outputs it is of
  c10::List<int64_t> saved_positions_;     // of the inputs that backward reads
  int64_t key_;
  int64_t first_backward_ = 0;
};

}  // namespace

void bind_step(py::module_& module) {
  py::class_<RecordedStep>(module, "RecordedStep")
      .def(py::init<std::shared_ptr<Session>, std::vector<int>, std::vector<int>, std::vector<int>,
                    std::vector<int>, const std::vector<Order>&,
                    const std::vector<std::vector<int64_t>>&, int64_t>(),
           py::arg("session"), py::arg("tensor_inputs"), py::arg("symbol_inputs"),
           py::arg("with_gradient"), py::arg("differentiable"), py::arg("orders"),
           py::arg("origins"), py::arg("key"))
      .def("watch_first_backward", &RecordedStep::watch_first_backward)
      .def("forget_first_backward", &RecordedStep::forget_first_backward)
      .def("__call__", &RecordedStep::run,
           "Run forward on a tuple of flat inputs; give the session's outputs and the token.");
  module.def(
      "set_differentiable_gradients",
      [](py::object function) { differentiable_gradients() = std::move(function); },
      "Set what makes gradients that can be differentiated: a function of a step's key, the flat "
      "inputs of a call (None if they are gone), its tangents, and what computes the gradients.");
}

}  // namespace torch_ort::python
