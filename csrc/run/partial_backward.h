// Backward of a session where autograd has gradients for some of its outputs alone.
//
// It works on what the forward call has kept for the whole backward half, and makes its gradients
// in memory of their own. Made at the first call with the same gradients.
#pragma once

#include "run/cut_backward.h"
#include "run/session.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

struct Context;

// What the last backward tells of the next one: which outputs get gradients. A model gives more
// than its loss uses (logits beside a loss), and does so at every step.
//
// So the next call runs in a session whose backward half is cut down to what these outputs need,
// and which is planned as a whole: its gradients are delivered, its memory is that of one step. It
// keeps all that the whole backward half reads, so that a backward with other gradients is a
// PartialBackward.
struct ExpectedBackward {
  std::vector<bool> defined;   // by gradient that comes in
  std::vector<int> gradients;  // by gradient of the whole: which of the session's; -1: none
  std::shared_ptr<Session> session;
  std::unordered_map<const ir::Value*, int> slots;  // of what the whole backward half reads
};

// Nothing where zeros would have to stand for a gradient that is missing, or no gradient is left.
std::shared_ptr<const ExpectedBackward> make_expected_backward(const CompiledGraph& whole,
                                                               const std::vector<bool>& defined);

class PartialBackward {
 public:
  // `defined`: by gradient that comes in. `context`: of any call.
  PartialBackward(std::shared_ptr<const CompiledGraph> whole, const std::vector<bool>& defined,
                  const Context& context);

  // With the saved tensors of `context` in their slots; `tangents`: the gradients that come in.
  // Gives the gradients of the whole session, undefined where none comes to them.
  Session::Tensors run(const Context& context, const Session::Tensors& tangents) const;
  void free_idle_contexts() const;

 private:
  at::Tensor read(const ir::Value* value, const Context& context,
                  const Session::Tensors& tangents) const;

  std::shared_ptr<const CompiledGraph> whole_;
  CutBackward cut_;
  std::vector<std::string> symbols_;
  std::shared_ptr<Session> session_;  // none where nothing is left
};

}  // namespace torch_ort::run
