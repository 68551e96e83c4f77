// The point-wise words of the language of fused regions, one row each. What a word computes is
// defined where code is generated: a struct of its name in cpu/pointwise_loops.h, and the text of
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

// Where the result is zero, whatever the operands that are not named here are.
enum class Zero : uint8_t {
  kUnknown,
  kFirst,    // where the first operand is
  kEither,   // where the first or the second operand is
  kAll,      // where all operands are
  kProduct,  // where the third operand is, and the first or the second
};

// Name, number of operands, cost, where the result is zero, and whether it is exact on integers. A
// region holds integers as doubles, so products and sums do not wrap around and are not exact.
#define TORCH_ORT_POINTWISE_WORDS(WORD)                                             \
  WORD(Copy, 1, kPlain, kFirst, false)                                              \
  WORD(Neg, 1, kPlain, kFirst, false)                                               \
  WORD(Abs, 1, kPlain, kFirst, false)                                               \
  WORD(Exp, 1, kSlow, kUnknown, false)                                              \
  WORD(Log, 1, kSlow, kUnknown, false)                                              \
  WORD(Log1p, 1, kSlow, kFirst, false)                                              \
  WORD(Sqrt, 1, kSlow, kFirst, false)                                               \
  WORD(Reciprocal, 1, kSlow, kUnknown, false)                                       \
  WORD(Tanh, 1, kSlow, kFirst, false)                                               \
  WORD(Erf, 1, kCostly, kFirst, false)                                              \
  WORD(Sigmoid, 1, kSlow, kUnknown, false)                                          \
  WORD(Relu, 1, kPlain, kFirst, false)                                              \
  WORD(Floor, 1, kPlain, kFirst, false)                                             \
  WORD(Ceil, 1, kPlain, kFirst, false)                                              \
  WORD(Round, 1, kPlain, kFirst, false)                                             \
  WORD(Trunc, 1, kPlain, kFirst, false)                                             \
  WORD(Sign, 1, kPlain, kFirst, false)                                              \
  WORD(Sin, 1, kSlow, kFirst, false)                                                \
  WORD(Cos, 1, kSlow, kUnknown, false)                                              \
  WORD(Not, 1, kPlain, kUnknown, true)                                              \
  WORD(IsNan, 1, kPlain, kFirst, false)                                             \
  WORD(ToBool, 1, kPlain, kFirst, false)                                            \
  WORD(ToBFloat16, 1, kPlain, kFirst, false) /* rounded, and still a wide number */ \
  WORD(ToHalf, 1, kPlain, kFirst, false)                                            \
  WORD(Gelu, 1, kCostly, kFirst, false)                                             \
  WORD(GeluTanh, 1, kCostly, kFirst, false)                                         \
  WORD(Silu, 1, kCostly, kFirst, false)                                             \
  WORD(HardSwish, 1, kPlain, kFirst, false)                                         \
  WORD(Add, 2, kPlain, kAll, false)                                                 \
  WORD(Sub, 2, kPlain, kAll, false)                                                 \
  WORD(Mul, 2, kPlain, kEither, false)                                              \
  WORD(Div, 2, kSlow, kFirst, false)                                                \
  WORD(Pow, 2, kSlow, kUnknown, false)                                              \
  WORD(Max, 2, kPlain, kAll, false)                                                 \
  WORD(Min, 2, kPlain, kAll, false)                                                 \
  WORD(LeakyRelu, 2, kPlain, kFirst, false) /* input, slope */                      \
  WORD(Equal, 2, kPlain, kUnknown, true)                                            \
  WORD(Less, 2, kPlain, kAll, true)                                                 \
  WORD(LessOrEqual, 2, kPlain, kUnknown, true)                                      \
  WORD(Greater, 2, kPlain, kAll, true)                                              \
  WORD(GreaterOrEqual, 2, kPlain, kUnknown, true)                                   \
  WORD(And, 2, kPlain, kEither, true)                                               \
  WORD(Or, 2, kPlain, kAll, true)                                                   \
  WORD(Xor, 2, kPlain, kAll, true)                                                  \
  WORD(GeluGrad, 2, kCostly, kFirst, false)     /* gradient, input */               \
  WORD(GeluTanhGrad, 2, kCostly, kFirst, false) /* gradient, input */               \
  WORD(SiluGrad, 2, kCostly, kFirst, false)     /* gradient, input */               \
  WORD(HardSwishGrad, 2, kPlain, kFirst, false) /* gradient, input */               \
  WORD(TanhGrad, 2, kPlain, kFirst, false)      /* gradient, result */              \
  WORD(SigmoidGrad, 2, kPlain, kFirst, false)   /* gradient, result */              \
  WORD(ThresholdGrad, 3, kPlain, kFirst, false) /* gradient, input, threshold */    \
  WORD(LeakyReluGrad, 3, kPlain, kFirst, false) /* gradient, input, slope */        \
  WORD(Where, 3, kPlain, kProduct, true)        /* condition, x, y */               \
  WORD(MulAdd, 3, kPlain, kProduct, false)      /* a * b + c */

enum class Pointwise : uint8_t {
#define TORCH_ORT_WORD(name, operands, cost, zero, on_integers) k##name,
  TORCH_ORT_POINTWISE_WORDS(TORCH_ORT_WORD)
#undef TORCH_ORT_WORD
      kCount
};

struct PointwiseWord {
  const char* name;  // as dumps of tile programs show it
  int num_operands;
  Cost cost;
  Zero zero;
  bool on_integers;
};

inline constexpr std::array<PointwiseWord, static_cast<size_t>(Pointwise::kCount)> kPointwiseWords =
    {{
#define TORCH_ORT_WORD(name, operands, cost, zero, on_integers) \
  {#name, operands, Cost::cost, Zero::zero, on_integers},
        TORCH_ORT_POINTWISE_WORDS(TORCH_ORT_WORD)
#undef TORCH_ORT_WORD
    }};

constexpr const PointwiseWord& word(Pointwise op) {
  return kPointwiseWords[static_cast<size_t>(op)];
}

}  // namespace torch_ort::ops
