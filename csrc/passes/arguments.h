// Readers of nodes that are calls of PyTorch operators.
#pragma once

#include "ir/graph.h"
#include "ops/call.h"

#include <cstdint>
#include <string>
#include <variant>

namespace torch_ort::passes {

// What tables of ops name a node by: its op, with the domain, or the operator of an ATen node.
inline std::string kind_of(const ir::Node& node) {
  const bool is_aten = ir::is(&node, "ATen", ir::kAtenDomain);
  return is_aten ? ir::string_attr(node.attrs, "operator", "") : node.op.str();
}

// Returns nullptr if the argument is None or not a tensor.
inline ir::Value* tensor(const ops::Arg& arg) {
  ir::Value* const* value = std::get_if<ir::Value*>(&arg.value);
  return value == nullptr ? nullptr : *value;
}

inline bool is_constant(const ops::Arg& arg) {
  const auto* dim = std::get_if<ir::Dim>(&arg.value);
  return dim != nullptr && dim->is_constant();
}

// The argument has to be a constant integer.
inline int64_t integer(const ops::Arg& arg) { return std::get<ir::Dim>(arg.value).constant(); }

}  // namespace torch_ort::passes
