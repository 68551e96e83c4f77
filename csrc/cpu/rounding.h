// Rounding to multiples of a unit; internal to cpu/.
#pragma once

#include <cstdint>

namespace torch_ort::cpu {

// For n >= 0.
constexpr int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

}  // namespace torch_ort::cpu
