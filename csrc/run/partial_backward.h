// The backward half of a session if only some of its outputs have gradients.
//
// It reads what the forward call has saved for the whole backward half, and allocates its
// gradients. It is made at the first call with gradients for these outputs.
#pragma once

#include "run/cut_backward.h"
#include "run/session.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

struct Context;

// Predicts which outputs get gradients: those that got them in the last backward. A model often
// returns more than its loss depends on, such as logits beside the loss, and does so in every step.
// Before the first backward these are the outputs without dims, as a loss is, if there are any.
//
// The next call runs in a session whose backward half is cut down to what these outputs need. That
// session is planned as a whole, so its gradients are delivered and its memory is that of one step.
// It also keeps all that the whole backward half reads, so that a PartialBackward can run if other
// outputs get gradients.
struct ExpectedBackward {
  std::vector<bool> defined;  // by incoming gradient
  // By gradient of the whole session: the gradient of `session` that it is; -1: none.
  std::vector<int> gradients;
  std::shared_ptr<Session> session;
  std::unordered_map<const ir::Value*, int>
      slots;  // of the values that the whole backward half reads
};

// The outputs that a first call expects to get gradients: those without dims, if there are any.
// Empty: all.
std::vector<bool> first_expected(const CompiledGraph& whole);

// Returns nullptr if zeros would have to replace a missing gradient, or if no gradient is left.
std::shared_ptr<const ExpectedBackward> make_expected_backward(const CompiledGraph& whole,
                                                               const std::vector<bool>& defined);

class PartialBackward {
 public:
  // `defined` says for each incoming gradient whether it is defined. `context` may be that of any
  // call.
  PartialBackward(std::shared_ptr<const CompiledGraph> whole, const std::vector<bool>& defined,
                  const Context& context);

  // Runs with the saved tensors in the slots of `context` and the incoming gradients `tangents`.
  // Returns the gradients of the whole session; those that do not exist are undefined.
  Session::Tensors run(const Context& context, const Session::Tensors& tangents) const;
  void free_idle_contexts() const;

 private:
  at::Tensor read(const ir::Value* value, const Context& context,
                  const Session::Tensors& tangents) const;

  std::shared_ptr<const CompiledGraph> whole_;
  CutBackward cut_;
  std::vector<std::string> symbols_;
  std::shared_ptr<Session> session_;  // nullptr if no gradient is left
};

}  // namespace torch_ort::run
