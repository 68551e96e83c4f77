#include "run/autograd/recorded_step.h"

#include "base/error.h"
#include "run/autograd/autograd_errors.h"
#include "run/autograd/early_gradients.h"
#include "run/key_table.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace torch_ort::run {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tensors = RecordedStep::Tensors;
using FirstBackward = RecordedStep::FirstBackward;

constexpr const char* kOrders = "orders";
constexpr const char* kOrigins = "origins";
constexpr const char* kFirstBackward = "first_backward";
constexpr const char* kKey = "key";
constexpr const char* kSavedPositions = "saved_positions";
constexpr const char* kStates = "autocast_states";
constexpr const char* kToken = "token";

DifferentiableGradients differentiable_gradients = nullptr;
OtherBackward other_backward = nullptr;

// What runs backward until the engine's backward has succeeded once, by step. There is no entry
// once it has succeeded or the step is gone.
KeyTable<FirstBackward>& first_backwards() {
  // Never destroyed, because Python frees objects that need it at its end.
  static auto* table = new KeyTable<FirstBackward>;
  return *table;
}

struct BackwardCall {
  int64_t watched;  // key of what runs instead of the engine; 0 if there is none
  int64_t key;      // of the step
  at::Tensor token;
  Tensors saved;
  c10::List<int64_t> saved_positions;  // the positions of `saved` among the flat inputs
  Tensors tangents;
  bool is_expected_state;  // whether the graph's backward is that of the present autocast state
  bool are_batched;        // the tangents

  // `early` is passed to the nodes of later segments, with which gradients may leave.
  Tensors run(NoGradient* early) const {
    if (!is_expected_state || are_batched) return other_backward(known());
    const auto watching = watched == 0 ? nullptr : first_backwards().find(watched);
    return watching == nullptr ? run_engine(early) : (*watching)(token, saved, tangents);
  }

  // Computes gradients that have a history themselves.
  Tensors run_differentiable() const {
    return differentiable_gradients(known(), [this] { return run(nullptr); });
  }

 private:
  KnownCall known() const {
    KnownCall call{.key = key,
                   .companion = kept_beside(token),
                   .token = token,
                   .tangents = tangents,
                   .are_batched = are_batched};
    for (size_t i = 0; i < saved_positions.size(); ++i) call.saved[saved_positions[i]] = saved[i];
    return call;
  }

  Tensors run_engine(NoGradient* early) const {
    RECORD_FUNCTION("torch_ort::run_backward", c10::ArrayRef<const c10::IValue>{});
    return with_python_errors([&] { return run_backward_of_node(token, saved, tangents, early); });
  }
};

// An incoming gradient, in the layout that the graph was recorded for.
at::Tensor in_order(const at::Tensor& gradient, const c10::List<int64_t>& order) {
  if (!gradient.defined()) return gradient;
  if (order.empty()) return gradient.contiguous();
  const RecordedStep::Order dims = order.vec();
  const at::Tensor rows = gradient.permute(dims);
  if (rows.is_contiguous()) return gradient;
  RecordedStep::Order inverse(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) inverse[dims[i]] = static_cast<int64_t>(i);
  return rows.contiguous().permute(inverse);
}

// Which gradients are undefined, rather than zeros, because only outputs without a gradient lead to
// them. Autograd does the same. Empty if all outputs have a gradient.
NoGradient without_gradient(const c10::List<c10::IValue>& origins, const variable_list& gradients) {
  NoGradient without;
  const auto is_defined = [](const at::Tensor& gradient) { return gradient.defined(); };
  if (std::all_of(gradients.begin(), gradients.end(), is_defined)) return without;
  for (size_t i = 0; i < origins.size(); ++i) {
    const c10::IValue of_one = origins.get(i);
    const c10::List<int64_t> outputs = of_one.toIntList();
    without.push_back(std::none_of(outputs.begin(), outputs.end(),
                                   [&](int64_t output) { return gradients[output].defined(); }));
  }
  return without;
}

BackwardCall take_apart(AutogradContext* context, const variable_list& gradients) {
  // If the step is inside of a checkpoint, this computes forward again.
  variable_list saved = context->get_saved_variables();
  const auto kept = context->saved_data.find(kToken);
  const std::ptrdiff_t num_tokens = kept == context->saved_data.end() ? 1 : 0;
  const std::vector<int64_t> states = context->saved_data[kStates].toIntVector();
  const bool is_expected_state =
      std::find(states.begin(), states.end(), autocast_now()) != states.end();
  const c10::List<c10::IValue> orders = context->saved_data[kOrders].toList();
  const bool is_batch = are_batched(gradients);
  Tensors tangents;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const c10::IValue order = orders.get(i);
    tangents.push_back(is_batch ? gradients[i] : in_order(gradients[i], order.toIntList()));
  }
  return {.watched = context->saved_data[kFirstBackward].toInt(),
          .key = context->saved_data[kKey].toInt(),
          .token = num_tokens == 1 ? saved.front() : kept->second.toTensor(),
          .saved = Tensors(saved.begin() + num_tokens, saved.end()),
          .saved_positions = context->saved_data[kSavedPositions].toIntList(),
          .tangents = std::move(tangents),
          .is_expected_state = is_expected_state,
          .are_batched = is_batch};
}

// Raises before anything has run what autograd raises where it saves a tensor of inference mode.
void refuse_inference_tensors(const Session& session, const Tensors& inputs) {
  for (int index : session.saved_inputs()) {
    if (inputs[index].defined() && inputs[index].is_inference()) {
      torch::autograd::SavedVariable(inputs[index], false);
    }
  }
}

}  // namespace

// One forward call, without the inputs that get gradients.
struct RecordedStep::Call {
  const RecordedStep& step;
  const Tensors& inputs;
  const std::vector<int64_t>& symbols;
  bool packs, early;
  Tensors results;
};

struct RecordedStep::Node : torch::autograd::Function<RecordedStep::Node> {
  static variable_list forward(AutogradContext* context, Call* call, at::TensorList /*given*/) {
    const RecordedStep& step = call->step;
    refuse_inference_tensors(*step.session_, call->inputs);
    call->results = step.session_->forward(call->inputs, call->symbols, call->packs, call->early);
    const Session& session = *step.session_;
    const at::Tensor& token = call->results[session.num_outputs()];
    variable_list saved;
    // Hooks may drop what they get, which would end the call.
    if (call->packs) {
      context->saved_data[kToken] = token;
    } else {
      saved.push_back(token);
    }
    for (int index : session.saved_inputs()) saved.push_back(call->inputs[index]);
    for (int index : session.saved_outputs()) saved.push_back(call->results[index]);
    context->save_for_backward(std::move(saved));
    context->set_materialize_grads(false);
    context->saved_data[kOrders] = step.orders_;
    context->saved_data[kOrigins] = step.origins_;
    context->saved_data[kFirstBackward] = step.first_backward_.load(std::memory_order_relaxed);
    context->saved_data[kKey] = step.key_;
    context->saved_data[kSavedPositions] = step.saved_positions_;
    context->saved_data[kStates] = step.states_;
    step.replace_lazy_logits(call->results);
    variable_list outputs;
    for (int index : step.differentiable_) outputs.push_back(call->results[index]);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const BackwardCall call = take_apart(context, gradients);
    NoGradient without = without_gradient(context->saved_data[kOrigins].toList(), gradients);
    const bool has_history = at::GradMode::is_enabled();  // create_graph=True
    Tensors made = has_history ? call.run_differentiable() : call.run(&without);
    leave_out(without, made);
    variable_list results{at::Tensor()};  // of the argument `Call`
    std::move(made.begin(), made.end(), std::back_inserter(results));
    return results;
  }
};

RecordedStep::RecordedStep(std::shared_ptr<Session> session, const Form& form, int64_t key)
    : session_(std::move(session)),
      differentiable_(form.differentiable),
      saved_positions_(form.saved_positions),
      lazy_(form.lazy),
      key_(key),
      always_early_(form.always_early) {
  for (const Order& order : form.orders) orders_.push_back(c10::List<int64_t>(order));
  for (const auto& outputs : form.origins) origins_.push_back(c10::List<int64_t>(outputs));
  for (const AutocastState& state : form.states) states_.push_back(encode_autocast(state));
}

RecordedStep::~RecordedStep() { forget_first_backward(); }

void RecordedStep::watch_first_backward(FirstBackward function) {
  forget_first_backward();
  first_backward_ = first_backwards().add(std::move(function));
}

void RecordedStep::forget_first_backward() {
  first_backwards().remove(first_backward_.exchange(0));
}

Tensors RecordedStep::run(const Tensors& inputs, const std::vector<int64_t>& symbols,
                          const Tensors& with_gradient, bool packs) const {
  RECORD_FUNCTION("torch_ort::run_forward", c10::ArrayRef<const c10::IValue>{});
  const bool may_cut = session_->compiled().options.segment_bytes > 0;
  Call call{.step = *this,
            .inputs = inputs,
            .symbols = symbols,
            .packs = packs,
            .early = may_cut && (always_early_ || are_waited_for(with_gradient))};
  try {
    variable_list made = Node::apply(&call, at::TensorList(with_gradient));
    if (call.early) leave_early(made, call.results[session_->num_outputs()]);
    for (size_t i = 0; i < made.size(); ++i) {
      call.results[differentiable_[i]] = std::move(made[i]);
    }
  } catch (...) {
    // A hook has raised when a tensor was to be saved. The node holds the outputs and these hold
    // the node, so the cycle must be broken.
    for (at::Tensor& result : call.results) {
      if (result.defined() && result.grad_fn()) result.detach_();
    }
    throw;
  }
  return std::move(call.results);
}

void RecordedStep::replace_lazy_logits(Tensors& results) const {
  for (const auto& [output, classes, dtype] : lazy_) {
    const at::Tensor rows = results[output];
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes.at(sizes.size() - 1) = classes;
    const std::vector<int64_t> strides(sizes.size(), 0);
    results[output] = at::empty_strided(sizes, strides, rows.options().dtype(dtype));
    results.push_back(rows);
  }
}

void RecordedStep::leave_early(const Tensors& made, const at::Tensor& token) const {
  const auto found = std::find_if(made.begin(), made.end(), [](const at::Tensor& each) {
    return each.defined() && each.grad_fn();
  });
  if (found == made.end()) return;
  torch::autograd::Node& node = *found->grad_fn();
  std::vector<int> edges(node.num_outputs());
  std::iota(edges.begin(), edges.end(), 0);
  let_leave_early(node, Session::segments(token), edges);
}

void set_differentiable_gradients(DifferentiableGradients function) {
  differentiable_gradients = function;
}

bool are_batched(at::TensorList gradients) {
  // `is_grads_batched` uses the first of these, torch.vmap the second.
  constexpr c10::DispatchKeySet kWrapped{c10::DispatchKey::Batched,
                                         c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper};
  return std::any_of(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
    return gradient.defined() && gradient.key_set().has_any(kWrapped);
  });
}

void set_other_backward(OtherBackward function) { other_backward = function; }

}  // namespace torch_ort::run
