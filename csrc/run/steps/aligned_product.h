// A product with more columns or a greater depth than its matrices have
// (run/memory/aligned_products.h).
#pragma once

#include "run/steps/product.h"

#include <memory>

namespace torch_ort::run {

// Each returns nullptr if the product is to be computed as it is.
std::unique_ptr<BoundStep> bind_aligned_product(const OutStep& step, const ProductSlots& slots,
                                                Binder& binder);
std::unique_ptr<BoundStep> bind_aligned_wide_product(const FunctionalStep& step,
                                                     const ProductSlots& slots, Binder& binder);

}  // namespace torch_ort::run
