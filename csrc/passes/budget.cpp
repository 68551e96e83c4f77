#include "passes/budget.h"

#include <cmath>

namespace torch_ort::passes {

double Speeds::flops(ir::DType dtype) const {
  if (dtype == ir::DType::kDouble) return flops_of_double;
  return ir::size_bytes(dtype) == 2 ? flops_of_short : flops_of_float;
}

int64_t Budget::bytes(int64_t dense_bytes) const {
  return std::llround(is_fraction ? amount * static_cast<double>(dense_bytes) : amount);
}

}  // namespace torch_ort::passes
