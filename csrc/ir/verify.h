// Checks what every graph has to satisfy. Throws InternalError with the name of the value or node
// that is wrong.
#pragma once

#include "ir/graph.h"

namespace torch_ort::ir {

// Checks that names are unique, that nodes come after the producers of their inputs, that uses and
// producers agree in both directions, that there is at most one YieldOp, and that inputs and
// initializers have no producer. `stage` goes into the message ("verify after fuse_bias_gelu:
// ...").
void verify(const Graph& graph, std::string_view stage);

}  // namespace torch_ort::ir
