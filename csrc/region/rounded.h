// Which short floats of a region are rounded although they stay in registers.
//
// Numbers inside of a region keep the digits of a float. Where a small difference between two
// numbers decides a lot, all regions have to agree on both, whether they compute them or read them
// from memory. A region of the backward half, which finds the places of a maximum or takes
// exp(x - logsumexp(x)), computes `x` again and reads a maximum or a logarithm that was rounded
// when the forward half wrote it. So the following are rounded as eager PyTorch rounds them:
//
// - what is compared, or rounded to an integer,
// - what a maximum or minimum is taken of,
// - the operands of a difference that an exponential is taken of.
//
// This is about values whose own dtype is short. A program, and the engine's own softmax, that cast
// them to float32 first keep all digits.
#pragma once

#include "ir/graph.h"
#include "region/spaces.h"

#include <unordered_set>
#include <vector>

namespace torch_ort::region {

// The results among those of a region's nodes that are rounded to their own dtype.
std::unordered_set<const ir::Value*> rounded_values(const std::vector<Member>& members);

}  // namespace torch_ort::region
