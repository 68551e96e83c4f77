// The point-wise words of the language of fused regions, one row each. What a word computes is
// defined where code is generated: a struct of its name in cpu/kernels_loops.h, and the text of
// cuda/text.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torch_ort::ops {

// The cost of computing one element, compared with that of reading and writing it.
enum class Cost : uint8_t {
  kPlain,
  kSlow,
  kCostly,  // a region is worthwhile even for this word alone
};

// Name, number of operands, cost, and whether it is exact on integers. A region holds integers as
// doubles, so products and sums do not wrap around and are not exact.
#define TORCH_ORT_POINTWISE_WORDS(WORD)                                     \
  WORD(Copy, 1, kPlain, false)                                              \
  WORD(Neg, 1, kPlain, false)                                               \
  WORD(Abs, 1, kPlain, false)                                               \
  WORD(Exp, 1, kSlow, false)                                                \
  WORD(Log, 1, kSlow, false)                                                \
  WORD(Sqrt, 1, kSlow, false)                                               \
  WORD(Reciprocal, 1, kSlow, false)                                         \
  WORD(Tanh, 1, kSlow, false)                                               \
  WORD(Erf, 1, kCostly, false)                                              \
  WORD(Sigmoid, 1, kSlow, false)                                            \
  WORD(Relu, 1, kPlain, false)                                              \
  WORD(Floor, 1, kPlain, false)                                             \
  WORD(Ceil, 1, kPlain, false)                                              \
  WORD(Round, 1, kPlain, false)                                             \
  WORD(Trunc, 1, kPlain, false)                                             \
  WORD(Sign, 1, kPlain, false)                                              \
  WORD(Sin, 1, kSlow, false)                                                \
  WORD(Cos, 1, kSlow, false)                                                \
  WORD(Not, 1, kPlain, true)                                                \
  WORD(IsNan, 1, kPlain, false)                                             \
  WORD(ToBool, 1, kPlain, false)                                            \
  WORD(ToBFloat16, 1, kPlain, false) /* rounded, and still a wide number */ \
  WORD(ToHalf, 1, kPlain, false)                                            \
  WORD(Gelu, 1, kCostly, false)                                             \
  WORD(GeluTanh, 1, kCostly, false)                                         \
  WORD(Silu, 1, kCostly, false)                                             \
  WORD(Add, 2, kPlain, false)                                               \
  WORD(Sub, 2, kPlain, false)                                               \
  WORD(Mul, 2, kPlain, false)                                               \
  WORD(Div, 2, kSlow, false)                                                \
  WORD(Pow, 2, kSlow, false)                                                \
  WORD(Max, 2, kPlain, false)                                               \
  WORD(Min, 2, kPlain, false)                                               \
  WORD(LeakyRelu, 2, kPlain, false) /* input, slope */                      \
  WORD(Equal, 2, kPlain, true)                                              \
  WORD(Less, 2, kPlain, true)                                               \
  WORD(LessOrEqual, 2, kPlain, true)                                        \
  WORD(Greater, 2, kPlain, true)                                            \
  WORD(GreaterOrEqual, 2, kPlain, true)                                     \
  WORD(And, 2, kPlain, true)                                                \
  WORD(Or, 2, kPlain, true)                                                 \
  WORD(Xor, 2, kPlain, true)                                                \
  WORD(GeluGrad, 2, kCostly, false)     /* gradient, input */               \
  WORD(GeluTanhGrad, 2, kCostly, false) /* gradient, input */               \
  WORD(SiluGrad, 2, kCostly, false)     /* gradient, input */               \
  WORD(TanhGrad, 2, kPlain, false)      /* gradient, result */              \
  WORD(SigmoidGrad, 2, kPlain, false)   /* gradient, result */              \
  WORD(ThresholdGrad, 3, kPlain, false) /* gradient, input, threshold */    \
  WORD(LeakyReluGrad, 3, kPlain, false) /* gradient, input, slope */        \
  WORD(Where, 3, kPlain, true)          /* condition, x, y */               \
  WORD(MulAdd, 3, kPlain, false)        /* a * b + c */

enum class Pointwise : uint8_t {
#define TORCH_ORT_WORD(name, operands, cost, on_integers) k##name,
  TORCH_ORT_POINTWISE_WORDS(TORCH_ORT_WORD)
#undef TORCH_ORT_WORD
      kCount
};

struct PointwiseWord {
  const char* name;  // as dumps of tile programs show it
  int num_operands;
  Cost cost;
  bool on_integers;
};

inline constexpr std::array<PointwiseWord, static_cast<size_t>(Pointwise::kCount)> kPointwiseWords =
    {{
#define TORCH_ORT_WORD(name, operands, cost, on_integers) \
  {#name, operands, Cost::cost, on_integers},
        TORCH_ORT_POINTWISE_WORDS(TORCH_ORT_WORD)
#undef TORCH_ORT_WORD
    }};

constexpr const PointwiseWord& word(Pointwise op) {
  return kPointwiseWords[static_cast<size_t>(op)];
}

}  // namespace torch_ort::ops
