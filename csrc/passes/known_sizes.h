// What is known of sizes before a call begins, and what kernels of ours need to know of values.
#pragma once

#include "ir/graph.h"

#include <optional>
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

// A size in the call that was captured; nothing if no hint of the graph tells.
std::optional<int64_t> hinted_size(const ir::Graph& graph, const ir::Dim& dim);

// Floating-point numbers of a shape that is known, where kernels of ours work on them.
bool is_real(const ir::Value* value);

}  // namespace torch_ort::passes
