// What kernels of ours need to know of a value before a call begins.
#pragma once

#include "ir/graph.h"

#include <string>
#include <unordered_set>

namespace torch_ort::passes {

// Values whose sizes are known when a call begins: from the shapes of the inputs, not from data.
class KnownSizes {
 public:
  explicit KnownSizes(const ir::Graph& graph);
  bool are_known(const ir::Value& value) const;
  bool is_known(const ir::Dim& dim) const;

 private:
  std::unordered_set<std::string> symbols_;
};

// Floating-point numbers of a shape that is known, where kernels of ours work on them.
bool is_real(const ir::Value* value);

}  // namespace torch_ort::passes
