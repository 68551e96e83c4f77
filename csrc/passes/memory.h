// Which values share memory, and who else may read or write it. Rewrites must not change what the
// caller sees.
#pragma once

#include "ir/graph.h"

#include <unordered_set>

namespace torch_ort::passes {

class SharedMemory {
 public:
  explicit SharedMemory(const ir::Graph& graph);

  // The value whose memory `value` is a view of.
  static const ir::Value* root(const ir::Value* value);
  // Whether a node writes into the memory of `value`.
  bool is_written(const ir::Value* value) const { return written_.contains(root(value)); }
  // Whether the memory of `value` is returned to the caller, who may write into it before the
  // backward half runs.
  bool leaves(const ir::Value* value) const { return leaving_.contains(root(value)); }
  // Whether the memory belongs to the caller from the beginning: that of a graph input, a
  // parameter, or a gradient that enters at the border.
  bool is_callers(const ir::Value* value) const;
  bool has_yield() const { return has_yield_; }

 private:
  std::unordered_set<const ir::Value*> written_, leaving_;
  bool has_yield_ = false;
};

}  // namespace torch_ort::passes
