// A recorded training graph as one node of autograd.
//
// Autograd saves what backward reads, so that it notices in-place edits and calls saved-tensor
// hooks. The token ends the call together with the node. All else that backward needs is plain data
// in the node, so that compiled autograd can trace it. Only functions that python/ registers here
// enter the interpreter.
//
// Python watches until one backward has succeeded, so that a failed one can run again in eager
// PyTorch (torch_ort/steps/first_backward.py). After that no Python runs between the user's
// backward() and the kernels.
#pragma once

#include "run/autograd/autocast.h"
#include "run/autograd/companion.h"
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
  using Order = std::vector<int64_t>;  // dims by stride, largest first; empty: row-major
  using FirstBackward = std::function<Tensors(const at::Tensor& token, const Tensors& saved,
                                              const Tensors& tangents)>;

  // An output that the caller computes when it is first read (passes/lazy_logits.h). The session
  // returns rows in its place.
  struct Lazy {
    int output;
    int64_t classes;
    at::ScalarType dtype;
  };

  // What autograd needs to know about the graph.
  struct Form {
    std::vector<int> differentiable;  // outputs of the session that have gradients
    std::vector<Order> orders;        // the orders of the dims of their gradients
    // By input with a gradient: the positions in `differentiable` of the outputs that depend on it.
    std::vector<std::vector<int64_t>> origins;
    // Whether gradients leave early even if nobody waits for them.
    bool always_early = false;
    // The positions of the session's saved inputs among the flat inputs that the companion of a
    // call knows.
    std::vector<int64_t> saved_positions;
    std::vector<Lazy> lazy;
    // The autocast states of backward() for which the graph's backward is the right one.
    std::vector<AutocastState> states;
  };

  // `key` identifies the graph to DifferentiableGradients and OtherBackward.
  RecordedStep(std::shared_ptr<Session> session, const Form& form, int64_t key);
  RecordedStep(const RecordedStep&) = delete;
  RecordedStep& operator=(const RecordedStep&) = delete;
  ~RecordedStep();

  // `function` runs the backward of later calls instead of the engine, until
  // forget_first_backward() is called.
  void watch_first_backward(FirstBackward function);
  void forget_first_backward();

  // Runs forward. Returns the session's outputs with their autograd history, then the token.
  // `with_gradient` are the inputs that get gradients; the other arguments are those of
  // Session::forward. A lazy output is a tensor with its sizes and history but one number of
  // memory; the rows from which it can be computed come after the token.
  Tensors run(const Tensors& inputs, const std::vector<int64_t>& symbols,
              const Tensors& with_gradient, bool packs) const;

 private:
  struct Call;
  struct Node;

  void replace_lazy_logits(Tensors& results) const;
  void leave_early(const Tensors& made, const at::Tensor& token) const;

  std::shared_ptr<Session> session_;
  std::vector<int> differentiable_;
  c10::List<c10::List<int64_t>> orders_, origins_;
  c10::List<int64_t> saved_positions_;
  c10::List<int64_t> states_;
  std::vector<Lazy> lazy_;
  int64_t key_;
  bool always_early_;
  std::atomic<int64_t> first_backward_{0};  // the key of the function; 0: none
};

// What is known of a call whose backward the graph alone cannot run.
struct KnownCall {
  int64_t key;                                   // of the step
  std::shared_ptr<Companion> companion;          // of the forward call; nullptr if there is none
  std::unordered_map<size_t, at::Tensor> saved;  // inputs by position
  const at::Tensor& token;
  const RecordedStep::Tensors& tangents;
  bool are_batched;  // the tangents, by torch.vmap or is_grads_batched
};

// Computes the gradients of a call with an autograd history, for create_graph=True. `compute` gives
// them without one. Set when the module is loaded.
using DifferentiableGradients = RecordedStep::Tensors (*)(
    const KnownCall& call, c10::function_ref<RecordedStep::Tensors()> compute);
void set_differentiable_gradients(DifferentiableGradients function);

// Computes the gradients of a call whose tangents are batched, or whose backward() is called in
// another autocast state than those of the graph. Set when the module is loaded.
using OtherBackward = RecordedStep::Tensors (*)(const KnownCall& call);
void set_other_backward(OtherBackward function);

// Whether one stands for a batch of gradients in a transform, and so has no memory of its own.
bool are_batched(at::TensorList gradients);

}  // namespace torch_ort::run
