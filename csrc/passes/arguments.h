// Readers of the arguments of a call, for passes that look at operators of PyTorch's.
#pragma once

#include "ops/call.h"

#include <cstdint>
#include <variant>

namespace torch_ort::passes {

// nullptr if it is None or no tensor.
inline ir::Value* tensor(const ops::Arg& arg) {
  ir::Value* const* value = std::get_if<ir::Value*>(&arg.value);
  return value == nullptr ? nullptr : *value;
}

// A constant integer.
inline int64_t integer(const ops::Arg& arg) { return std::get<ir::Dim>(arg.value).constant(); }

}  // namespace torch_ort::passes
