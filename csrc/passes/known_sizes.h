// Which sizes are known before a call begins, and which values the engine's own kernels can take.
#pragma once

#include "ir/graph.h"

#include <optional>
#include <string>
#include <unordered_set>

namespace torch_ort::passes {

// Tells which sizes are known when a call begins: those made of constants, of the symbols that the
// caller passes, and of symbols that are a dim of an input. All others are unbacked: only data
// decides them.
class KnownSizes {
 public:
  explicit KnownSizes(const ir::Graph& graph);
  bool are_known(const ir::Value& value) const;
  bool is_known(const ir::Dim& dim) const;

 private:
  std::unordered_set<std::string> symbols_;
};

// The size in the call that was captured, by Graph::size_hints; nothing if a symbol in it has no
// hint.
std::optional<int64_t> hinted_size(const ir::Graph& graph, const ir::Dim& dim);

// Whether a value is a floating-point tensor of known shape on a device whose code generator takes
// it (region::takes). False for nullptr.
bool is_fusible_float(const ir::Value* value);

}  // namespace torch_ort::passes
