// Tensors that are made from numbers.
#pragma once

#include "ir/graph.h"

namespace torch_ort::ops {

// Whether a node is a call of a PyTorch operator that gives a tensor of zeros.
bool fills_with_zeros(const ir::Node& node);

}  // namespace torch_ort::ops
