// An object that the caller of forward attaches to a call, and that lives until the token of the
// call ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace torch_ort::run {

struct Companion {
  virtual ~Companion() = default;
};

// Attaches a companion to the call of a token.
void keep_beside(const at::Tensor& token, std::shared_ptr<Companion> companion);

// Returns the companion, or nullptr if there is none. Throws torch's error if the call has ended.
std::shared_ptr<Companion> kept_beside(const at::Tensor& token);

}  // namespace torch_ort::run
