// Which values share memory, and who else may read or write it: what a rewrite must not change,
// because the caller sees it.
#pragma once

#include "ir/graph.h"

#include <unordered_set>

namespace torch_ort::passes {

class SharedMemory {
 public:
  explicit SharedMemory(const ir::Graph& graph);

  // The value whose memory `value` looks at.
  static const ir::Value* root(const ir::Value* value);
  // A node writes into the memory of `value`.
  bool is_written(const ir::Value* value) const { return written_.contains(root(value)); }
  // The memory of `value` is handed to the caller, who may write into it before the backward half
  // runs.
  bool leaves(const ir::Value* value) const { return leaving_.contains(root(value)); }
  // The memory belongs to the caller from the start: a graph input, a parameter, a gradient that
  // comes back at the border.
  bool is_callers(const ir::Value* value) const;
  bool has_yield() const { return has_yield_; }

 private:
  std::unordered_set<const ir::Value*> written_, leaving_;
  bool has_yield_ = false;
};

}  // namespace torch_ort::passes
