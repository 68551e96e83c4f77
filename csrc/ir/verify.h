// States what a legal graph is. Raises InternalError naming the value or node that is wrong.
#pragma once

#include "ir/graph.h"

namespace torch_ort::ir {

// Names are unique, nodes stand after what they read, uses and producers agree in both
// directions, at most one YieldOp, inputs and initializers have no producer.
// `stage` goes into the message ("verify after fuse_bias_gelu: ...").
void verify(const Graph& graph, std::string_view stage);

}  // namespace torch_ort::ir
