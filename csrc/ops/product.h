// Finds products of matrices, and what sums start from.
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

// The operands of a product of two matrices that is wider than they are: of short floats, in
// float32. Nothing if the call is no such product.
std::optional<ProductArgs> find_wide_product(const Call& call);

// Whether the call multiplies two matrices, whatever it does with the product.
bool multiplies_matrices(const Call& call);

// The tensor to which a node adds what it computes of its first two inputs, that is, its third
// input. nullptr if there is none, or if the node is no product of matrices and no gradient of an
// embedding.
ir::Value* start_of(const ir::Node& node);

}  // namespace torch_ort::ops
