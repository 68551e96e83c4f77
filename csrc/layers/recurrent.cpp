// The operators of recurrent layers on the CPU: one layer in one direction (cpu/recurrent.h), and
// its gradient. torch_ort/functions/recurrent.py makes a whole torch.nn.LSTM of them, and captures
// learn the forms of their results from torch_ort/rules/recurrent.py.
#include "cpu/recurrent.h"

#include "base/error.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torch_ort::layers {

namespace {

using Given = std::optional<at::Tensor>;
// The states of all times, the last one, the last memory of an LSTM, and what backward needs. What
// a cell has not is empty.
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of the sequence, of the product of the state and the weight, of the first state and of the first
// memory. The second is empty where it is the first.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// ---- kernels

std::string text(at::IntArrayRef sizes) { return c10::str(sizes); }

void check_sizes(const at::Tensor& tensor, const std::vector<int64_t>& want, const char* what) {
  if (tensor.sizes() == at::IntArrayRef(want)) return;
  throw UserError(
      concat("recurrent: ", what, ": got sizes ", text(tensor.sizes()), ", want ", text(want)));
}

void check_dtype(const at::Tensor& tensor, at::ScalarType want, const char* what) {
  if (tensor.scalar_type() == want) return;
  throw UserError(concat("recurrent: ", what, ": got ", c10::toString(tensor.scalar_type()),
                         ", want ", c10::toString(want)));
}

// The sizes of a layer, of which all tensors are checked.
struct Sizes {
  cpu::Cell cell;
  at::ScalarType dtype;
  int64_t steps, batch, width, gates;

  Sizes(c10::string_view name, const at::Tensor& sequence, const at::Tensor& state)
      : cell(cpu::cell_from_name({name.data(), name.size()})), dtype(state.scalar_type()) {
    if (sequence.dim() != 3 || state.dim() != 2) {
      throw UserError(concat("recurrent: got a sequence of ", sequence.dim(),
                             " dims and a state of ", state.dim(), ", want 3 and 2"));
    }
    steps = sequence.size(0);
    batch = state.size(0);
    width = state.size(1);
    gates = cpu::num_gates(cell) * width;
    if (steps == 0) throw UserError("recurrent: got a sequence without times");
    if (dtype != at::kFloat && dtype != at::kDouble) {
      throw UserError(
          concat("recurrent: state: got ", c10::toString(dtype), ", want Float or Double"));
    }
  }

  at::Tensor checked(const at::Tensor& tensor, const std::vector<int64_t>& want,
                     const char* what) const {
    check_dtype(tensor, dtype, what);
    check_sizes(tensor, want, what);
    return tensor.contiguous();
  }
  std::optional<at::Tensor> checked(const Given& tensor, const std::vector<int64_t>& want,
                                    const char* what) const {
    if (!tensor || !tensor->defined()) return std::nullopt;
    return checked(*tensor, want, what);
  }
  at::Tensor of_times(int64_t last, const at::Tensor& like) const {
    return at::empty({steps, batch, last}, like.options());
  }
  // For the memory of an LSTM; empty for other cells.
  at::Tensor of_memory(const at::Tensor& like) const {
    return at::empty({is_lstm() ? batch : 0, width}, like.options());
  }
  bool is_lstm() const { return cell == cpu::Cell::kLstm; }
};

template <typename T>
const T* data_of(const Given& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}
template <typename T>
T* data_of(at::Tensor& tensor) {
  return tensor.mutable_data_ptr<T>();
}

// The tensors of a layer, in memory as the kernels want it.
struct Layer {
  Sizes sizes;
  at::Tensor weight, state;
  Given memory;

  Layer(const Sizes& of, const at::Tensor& given_weight, const at::Tensor& given_state,
        const Given& given_memory)
      : sizes(of),
        weight(of.checked(given_weight, {of.gates, of.width}, "weight")),
        state(given_state.contiguous()),
        memory(of.checked(given_memory, {of.batch, of.width}, "memory")) {
    if (of.is_lstm() && !memory) {
      throw UserError("recurrent: memory: got none, which an LSTM needs");
    }
  }

  template <typename T>
  cpu::Recurrence<T> of(bool reverse) const {
    return {.cell = sizes.cell,
            .reverse = reverse,
            .steps = sizes.steps,
            .batch = sizes.batch,
            .width = sizes.width,
            .weight = weight.const_data_ptr<T>(),
            .state = state.const_data_ptr<T>(),
            .memory = data_of<T>(memory)};
  }
};

Results forward(const at::Tensor& sequence, const at::Tensor& weight, const Given& bias,
                const at::Tensor& state, const Given& memory, c10::string_view cell, bool reverse,
                bool keeps) {
  const Sizes sizes(cell, sequence, state);
  const at::Tensor gates =
      sizes.checked(sequence, {sizes.steps, sizes.batch, sizes.gates}, "sequence");
  const Layer layer(sizes, weight, state, memory);
  const Given added = sizes.checked(bias, {sizes.width}, "bias");
  at::Tensor output = sizes.of_times(sizes.width, state);
  at::Tensor last_memory = sizes.of_memory(state);
  const int64_t kept_parts = keeps ? cpu::num_kept(sizes.cell) : 0;
  at::Tensor kept = at::empty({sizes.steps, kept_parts, sizes.batch, sizes.width}, state.options());
  const auto compute = [&]<typename T>(T /*dtype*/) {
    cpu::run<T>(layer.of<T>(reverse),
                {.gates = gates.const_data_ptr<T>(),
                 .bias = data_of<T>(added),
                 .output = data_of<T>(output),
                 .last_memory = data_of<T>(last_memory),
                 .kept = kept_parts > 0 ? data_of<T>(kept) : nullptr},
                cpu::best_isa());
  };
  sizes.dtype == at::kFloat ? compute(float{}) : compute(double{});
  return {output, output.select(0, reverse ? 0 : sizes.steps - 1).clone(), last_memory, kept};
}

Gradients backward(const Given& output_gradient, const Given& last_gradient,
                   const Given& last_memory_gradient, const at::Tensor& weight,
                   const at::Tensor& state, const Given& memory, const at::Tensor& output,
                   const at::Tensor& kept, c10::string_view cell, bool reverse) {
  const Sizes sizes(cell, output, state);
  const std::vector<int64_t> of_state = {sizes.batch, sizes.width};
  const std::vector<int64_t> of_output = {sizes.steps, sizes.batch, sizes.width};
  const Layer layer(sizes, weight, state, memory);
  const at::Tensor outputs = sizes.checked(output, of_output, "output");
  const at::Tensor parts = sizes.checked(
      kept, {sizes.steps, cpu::num_kept(sizes.cell), sizes.batch, sizes.width}, "kept");
  const Given of_outputs = sizes.checked(output_gradient, of_output, "gradient of the output");
  const Given of_last = sizes.checked(last_gradient, of_state, "gradient of the last state");
  const Given of_memory =
      sizes.checked(last_memory_gradient, of_state, "gradient of the last memory");
  at::Tensor gates = sizes.of_times(sizes.gates, state);
  const bool is_gru = sizes.cell == cpu::Cell::kGru;
  at::Tensor hidden = is_gru ? at::empty_like(gates) : at::empty({0}, state.options());
  at::Tensor first = at::empty(of_state, state.options());
  at::Tensor first_memory = sizes.of_memory(state);
  const auto compute = [&]<typename T>(T /*dtype*/) {
    cpu::run<T>(layer.of<T>(reverse),
                {.output = outputs.const_data_ptr<T>(),
                 .kept = parts.const_data_ptr<T>(),
                 .output_gradient = data_of<T>(of_outputs),
                 .last_gradient = data_of<T>(of_last),
                 .last_memory_gradient = data_of<T>(of_memory),
                 .gates_gradient = data_of<T>(gates),
                 .hidden_gradient = data_of<T>(hidden),
                 .state_gradient = data_of<T>(first),
                 .memory_gradient = data_of<T>(first_memory)},
                cpu::best_isa());
  };
  sizes.dtype == at::kFloat ? compute(float{}) : compute(double{});
  return {gates, hidden, first, first_memory};
}

// ---- gradients

// Calls go through the dispatcher, where captures see them.
Results call_forward(const at::Tensor& sequence, const at::Tensor& weight, const Given& bias,
                     const at::Tensor& state, const Given& memory, c10::string_view cell,
                     bool reverse, bool keeps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_ort::recurrent", "")
                             .typed<decltype(forward)>();
  return op.call(sequence, weight, bias, state, memory, cell, reverse, keeps);
}

Gradients call_backward(const Given& output_gradient, const Given& last_gradient,
                        const Given& last_memory_gradient, const at::Tensor& weight,
                        const at::Tensor& state, const Given& memory, const at::Tensor& output,
                        const at::Tensor& kept, c10::string_view cell, bool reverse) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_ort::recurrent_backward", "")
                             .typed<decltype(backward)>();
  return op.call(output_gradient, last_gradient, last_memory_gradient, weight, state, memory,
                 output, kept, cell, reverse);
}

// The gradient of the weight: of each time the gradient of its product times the state before. All
// times but the first are a product of two ranges of memory.
at::Tensor weight_gradient(const at::Tensor& gradient, const at::Tensor& output,
                           const at::Tensor& state, bool reverse) {
  const auto rest = [](const at::Tensor& tensor, bool without_first) {
    const c10::SymInt times = tensor.sym_size(0);
    return tensor.narrow_symint(0, without_first ? 1 : 0, times - 1).flatten(0, 1);
  };
  const at::Tensor of_rest = rest(gradient, !reverse).t().mm(rest(output, reverse));
  const at::Tensor first = gradient.select(0, reverse ? -1 : 0);
  return of_rest.addmm(first.t(), state);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The positions of the tensors among the arguments.
enum Argument : size_t { kSequence, kWeight, kBias, kState, kMemory, kCell, kReverse, kCount };

struct Function : torch::autograd::Function<Function> {
  static variable_list forward(AutogradContext* context, const at::Tensor& sequence,
                               const at::Tensor& weight, const Given& bias, const at::Tensor& state,
                               const Given& memory, const std::string& cell, bool reverse) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [output, last, last_memory, kept] =
        call_forward(sequence, weight, bias, state, memory, cell, reverse, true);
    context->save_for_backward({weight, state, memory.value_or(at::Tensor()), output, kept});
    context->saved_data["cell"] = cell;
    context->saved_data["reverse"] = reverse;
    context->saved_data["has_bias"] = bias.has_value();
    context->set_materialize_grads(false);
    context->mark_non_differentiable({kept});
    return {output, last, last_memory, kept};
  }

  static variable_list backward(AutogradContext* context, const variable_list& given) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &weight = saved[0], &state = saved[1], &memory = saved[2], &output = saved[3];
    const std::string cell = context->saved_data["cell"].toStringRef();
    const bool reverse = context->saved_data["reverse"].toBool();
    const auto or_none = [](const at::Tensor& tensor) {
      return tensor.defined() ? Given(tensor) : std::nullopt;
    };
    const bool is_lstm = memory.defined();
    auto [gates, hidden, first, first_memory] = call_backward(
        or_none(given[0]), or_none(given[1]), is_lstm ? or_none(given[2]) : std::nullopt, weight,
        state, or_none(memory), output, saved[4], cell, reverse);
    const bool is_gru = cell == "gru";
    const at::Tensor& of_product = is_gru ? hidden : gates;
    variable_list all(kCount);
    all[kSequence] = gates;
    all[kState] = first;
    if (is_lstm) all[kMemory] = first_memory;
    if (context->needs_input_grad(kWeight)) {
      all[kWeight] = weight_gradient(of_product, output, state, reverse);
    }
    // Edges are counted without those arguments that are not there.
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(kBias)) {
      const c10::SymInt width = state.sym_size(1);
      all[kBias] = of_product.narrow_symint(2, width * 2, width).sum(at::IntArrayRef{0, 1});
    }
    return all;
  }
};

Results with_gradient(const at::Tensor& sequence, const at::Tensor& weight, const Given& bias,
                      const at::Tensor& state, const Given& memory, c10::string_view cell,
                      bool reverse, bool keeps) {
  const auto asks = [](const Given& tensor) {
    return tensor && tensor->defined() && tensor->requires_grad();
  };
  const bool is_asked = asks(sequence) || asks(weight) || asks(bias) || asks(state) || asks(memory);
  if (!at::GradMode::is_enabled() || !is_asked) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(sequence, weight, bias, state, memory, cell, reverse, keeps);
  }
  const variable_list made =
      Function::apply(sequence, weight, bias, state, memory, std::string(cell), reverse);
  return {made[0], made[1], made[2], made[3]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_ort, library) {
  library.def(
      "recurrent(Tensor sequence, Tensor weight, Tensor? bias, Tensor state, Tensor? memory, "
      "str cell, bool reverse, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "recurrent_backward(Tensor? output_gradient, Tensor? last_gradient, "
      "Tensor? last_memory_gradient, Tensor weight, Tensor state, Tensor? memory, Tensor output, "
      "Tensor kept, str cell, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_ort, CPU, library) {
  library.impl("recurrent", forward);
  library.impl("recurrent_backward", backward);
}

TORCH_LIBRARY_IMPL(torch_ort, Autograd, library) {
  library.impl("recurrent", with_gradient);
  library.impl("recurrent_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace torch_ort::layers
