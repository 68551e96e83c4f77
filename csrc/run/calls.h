// What forward and backward calls share; internal to run/.
#pragma once

#include "run/context.h"
#include "run/session.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

namespace torch_ort::run {

// A context in use; it goes back to its binding when all have let go of it.
std::shared_ptr<Context> shared_context(std::unique_ptr<Context> context);

// The context of a forward call. Raises torch's error where the call has ended.
std::shared_ptr<Context> context_of(const at::Tensor& token);

// Whether a token holds all bytes that backward needs; it names no context then.
inline bool is_carrying(const at::Tensor& token) { return token.scalar_type() == at::kByte; }

at::Tensor bytes_over(void* data, int64_t size, c10::Device device);

// Strides that AOTAutograd promised to whoever reads the result.
at::Tensor with_promised_strides(const at::Tensor& tensor, const TensorSpec& spec);

// Names the session in profiles: graphs may have equal names of steps.
class RunEvent {
 public:
  explicit RunEvent(const Session& session);

 private:
  at::RecordFunction event_{at::RecordScope::FUNCTION};
};

}  // namespace torch_ort::run
