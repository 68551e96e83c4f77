// Rounding to multiples of a unit.
#pragma once

#include <cstdint>

namespace torch_ort {

// For n >= 0.
constexpr int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

}  // namespace torch_ort
