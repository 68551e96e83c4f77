// A recorded training graph as one node of autograd.
//
// What backward reads is saved as autograd saves: edits are noticed, hooks are called, and the
// token ends the engine's context with the node. Everything else that backward wants is data in the
// node, so that a trace of backward (compiled autograd) can hold it. Only what python/ hands over
// here enters the interpreter.
#pragma once

#include "run/companion.h"
#include "run/session.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

class RecordedStep {
 public:
  using Tensors = Session::Tensors;
  using Order = std::vector<int64_t>;  // dims by strides, outermost first; empty: row-major
  using FirstBackward = std::function<Tensors(const at::Tensor& token, const Tensors& saved,
                                              const Tensors& tangents)>;

  // An output that the caller makes at first read (passes/lazy_logits.h): in its place the session
  // gives rows.
  struct Lazy {
    int output;
    int64_t classes;
    at::ScalarType dtype;
  };

  // What of the graph autograd sees.
  struct Form {
    std::vector<int> differentiable;  // outputs of the session
    std::vector<Order> orders;        // of their gradients
    // By input with a gradient: the positions in `differentiable` of the outputs it is of.
    std::vector<std::vector<int64_t>> origins;
    // Whether gradients leave early where nobody waits for them, too.
    bool always_early = false;
    // Of the session's saved inputs, among the flat inputs that a call's companion knows.
    std::vector<int64_t> saved_positions;
    std::vector<Lazy> lazy;
  };

  // `key`: what DifferentiableGradients knows the graph by.
  RecordedStep(std::shared_ptr<Session> session, const Form& form, int64_t key);
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;
  ~RecordedStep();

  // Runs the backward of later calls instead of the engine, until it is forgotten.
  void watch_first_backward(FirstBackward function);
  void forget_first_backward();

  // Gives the session's outputs with their history, then the token. `with_gradient`: the inputs
  // that get gradients. Else as Session::forward. A lazy output is a tensor of its sizes and with
  // its history that has one number in memory; behind the token stand the rows that are there in
  // the places of these.
  Tensors run(const Tensors& inputs, const std::vector<int64_t>& symbols,
              const Tensors& with_gradient, bool carry) const;

 private:
  struct Call;
  struct Node;

  void stand_in_for_lazy(Tensors& results) const;
  void leave_early(const Tensors& made, const at::Tensor& token) const;

  std::shared_ptr<Session> session_;
  std::vector<int> differentiable_;
  c10::List<c10::List<int64_t>> orders_, origins_;
  c10::List<int64_t> saved_positions_;
  std::vector<Lazy> lazy_;
  int64_t key_;
  bool always_early_;
  std::atomic<int64_t> first_backward_{0};  // the key of what watches; 0: nothing does
};

// A backward call whose gradients are to be differentiated: create_graph=True.
struct DifferentiableCall {
  int64_t key;                                   // of the step
  std::shared_ptr<Companion> companion;          // of the forward call; null where none was kept
  std::unordered_map<size_t, at::Tensor> saved;  // inputs, by their positions
  const RecordedStep::Tensors& tangents;
  c10::function_ref<RecordedStep::Tensors()> compute;  // the gradients, without a history
};

// Gives the gradients of a call with a history. Set when the module is loaded.
using DifferentiableGradients = RecordedStep::Tensors (*)(const DifferentiableCall& call);
void set_differentiable_gradients(DifferentiableGradients function);

}  // namespace torch_ort::run
