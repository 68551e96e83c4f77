// Readers of the arguments of a call, for passes that look at PyTorch operators.
#pragma once

#include "ops/call.h"

#include <cstdint>
#include <variant>

namespace torch_ort::passes {

// Returns nullptr if the argument is None or not a tensor.
inline ir::Value* tensor(const ops::Arg& arg) {
  ir::Value* const* value = std::get_if<ir::Value*>(&arg.value);
  return value == nullptr ? nullptr : *value;
}

// The argument has to be a constant integer.
inline int64_t integer(const ops::Arg& arg) { return std::get<ir::Dim>(arg.value).constant(); }

}  // namespace torch_ort::passes
