// The calls that wait for their backward, and what forward and backward calls share; internal to
// run/.
#pragma once

#include "run/autograd/companion.h"
#include "run/autograd/packed_call.h"
#include "run/context.h"
#include "run/session.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace torch_ort::run {

// Shares a context that is in use. It returns to its binding when the last owner releases it.
std::shared_ptr<Context> shared_context(std::unique_ptr<Context> context);

// A forward call whose backward may run yet. What backward needs is in a context, or packed.
struct LiveCall {
  std::shared_ptr<const Variant> variant;  // that it follows
  std::shared_ptr<const Binding> binding;
  std::shared_ptr<Context> context;
  std::shared_ptr<const PackedCall> packed;
  std::shared_ptr<Companion> companion;
};

// The token of a forward call that has run in a context: a tensor whose deleter ends the call. With
// `packs` the active saved-tensor hooks get what the context keeps, and the context is released.
at::Tensor make_token(std::shared_ptr<Context> context, bool packs);
// Throws torch's error if the call has ended.
std::shared_ptr<const LiveCall> call_of(const at::Tensor& token);
// Frees what was packed. No backward of the call can run any more.
void drop_packed(const at::Tensor& token);

// What autograd gives back for a saved tensor that had this layout. A saved-tensor hook may have
// changed it: returns a copy if the strides are others, and throws UserError if more is.
at::Tensor as_saved(const at::Tensor& tensor, const TensorSpec& spec);

// Returns the tensor with the strides that AOTAutograd promised to the reader of the result.
at::Tensor with_promised_strides(const at::Tensor& tensor, const TensorSpec& spec);

// Marks a call in profiles by the id of its session, since steps of different graphs may have equal
// names.
class RunEvent {
 public:
  explicit RunEvent(const Session& session);

 private:
  at::RecordFunction event_{at::RecordScope::FUNCTION};
};

}  // namespace torch_ort::run
