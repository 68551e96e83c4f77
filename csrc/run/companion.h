// What a caller of forward keeps beside a call, until the token of the call ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace torch_ort::run {

struct Companion {
  virtual ~Companion() = default;
};

// Nothing where the token holds the call's state itself, as it does under saved-tensor hooks.
void keep_beside(const at::Tensor& token, std::shared_ptr<Companion> companion);

// Null where nothing was kept. Raises torch's error where the call has ended.
std::shared_ptr<Companion> kept_beside(const at::Tensor& token);

}  // namespace torch_ort::run
