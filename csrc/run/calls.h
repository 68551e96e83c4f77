// Functions that forward and backward calls share; internal to run/.
#pragma once

#include "run/context.h"
#include "run/session.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace torch_ort::run {

// Shares a context that is in use. It returns to its binding when the last owner releases it.
std::shared_ptr<Context> shared_context(std::unique_ptr<Context> context);

// The context of a forward call. Throws torch's error if the call has ended.
std::shared_ptr<Context> context_of(const at::Tensor& token);

// Whether a token carries the bytes that backward needs, rather than naming a context.
inline bool is_carrying(const at::Tensor& token) { return token.scalar_type() == at::kByte; }

at::Tensor bytes_over(void* data, int64_t size, c10::Device device);

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
