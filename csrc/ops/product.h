// Finds calls that are one product of matrices, or of a batch of them.
#pragma once

#include "ops/call.h"

#include <optional>

namespace torch_ort::ops {

// result <- start + a * b
struct ProductArgs {
  ir::Value *a = nullptr, *b = nullptr;
  ir::Value* start = nullptr;  // nullptr: nothing is added
};

// The operands of the product. Nothing if the call is no product, or scales one.
std::optional<ProductArgs> find_product(const Call& call);

}  // namespace torch_ort::ops
