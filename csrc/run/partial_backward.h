// Backward of a session where autograd has gradients for some of its outputs alone.
//
// It works on what the forward call has kept for the whole backward half, and makes its gradients
// in memory of their own. Made at the first call with the same gradients.
#pragma once

#include "run/context.h"
#include "run/cut_backward.h"
#include "run/session.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

class PartialBackward {
 public:
  // `defined`: by gradient that comes in. `context`: of any call.
  PartialBackward(const Session& whole, const std::vector<bool>& defined, const Context& context);

  // With the saved tensors and the gradients of `context` in their slots. Gives the gradients of
  // the whole session, undefined where none comes to them.
  Session::Tensors run(const Context& context) const;

 private:
  at::Tensor own(const at::Tensor& gradient, const Session::Tensors& inputs) const;

  const Session& whole_;
  CutBackward cut_;
  std::vector<std::string> symbols_;
  std::shared_ptr<Session> session_;  // none where nothing is left
};

}  // namespace torch_ort::run
