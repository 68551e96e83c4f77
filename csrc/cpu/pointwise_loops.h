// The point-wise words of tile programs, in ATen's vectors. A part of kernels_loops.h; everything
// here has internal linkage for the reason given there.
#pragma once

#include "cpu/exponential_loops.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace torch_ort::cpu {
namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename T, typename F>
inline void for_each_vector(int64_t n, F body) {
  constexpr int64_t width = Vec<T>::size();
  int64_t i = 0;
  for (; i + width <= n; i += width) body(i, width);
  if (i < n) body(i, n - i);
}

template <typename T, bool kScalar>
struct Operand {
  explicit Operand(const T* data) : data_(data) {
    if constexpr (kScalar) splat_ = Vec<T>(*data);
  }
  Vec<T> at(int64_t i, int64_t count) const {
    if constexpr (kScalar) return splat_;
    return count == Vec<T>::size() ? Vec<T>::loadu(data_ + i) : Vec<T>::loadu(data_ + i, count);
  }
  const T* data_;
  Vec<T> splat_;
};

template <typename T>
inline void put(T* d, int64_t i, int64_t count, const Vec<T>& value) {
  if (count == Vec<T>::size()) {
    value.store(d + i);
  } else {
    value.store(d + i, static_cast<int>(count));
  }
}

template <typename T, typename F>
void unary(T* d, const T* a, const T*, const T*, int64_t n) {
  const Operand<T, false> x(a);
  for_each_vector<T>(n, [&](int64_t i, int64_t count) { put(d, i, count, F::of(x.at(i, count))); });
}

template <typename T, typename F, int kScalars>
void binary(T* d, const T* a, const T* b, const T*, int64_t n) {
  const Operand<T, (kScalars & 1) != 0> x(a);
  const Operand<T, (kScalars & 2) != 0> y(b);
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    put(d, i, count, F::of(x.at(i, count), y.at(i, count)));
  });
}

template <typename T, typename F, int kScalars>
void ternary(T* d, const T* a, const T* b, const T* c, int64_t n) {
  const Operand<T, (kScalars & 1) != 0> x(a);
  const Operand<T, (kScalars & 2) != 0> y(b);
  const Operand<T, (kScalars & 4) != 0> z(c);
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    put(d, i, count, F::of(x.at(i, count), y.at(i, count), z.at(i, count)));
  });
}

// The compiler computes what both words need once.
template <typename T, typename Word, typename Gradient>
void with_gradient(T* d, T* gradient, const T* a, const T* b, int64_t n) {
  const Operand<T, false> x(a), y(b);
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    const Vec<T> along = x.at(i, count), at = y.at(i, count);
    put(d, i, count, Word::of(at));
    put(gradient, i, count, Gradient::of(along, at));
  });
}

template <typename T>
inline Vec<T> one() {
  return Vec<T>(T(1));
}

template <typename T>
inline Vec<T> sigmoid(const Vec<T>& x) {
  return one<T>() / (one<T>() + exp(x.neg()));
}

// A truth value as the mask that blendv expects.
template <typename T>
inline Vec<T> mask(const Vec<T>& truth) {
  return truth != Vec<T>(T(0));
}

template <typename T>
inline Vec<T> truth(const Vec<T>& x) {
  return x.ne(Vec<T>(T(0)));
}

// -0.0 is kept, as in PyTorch.
template <typename T>
inline Vec<T> relu(const Vec<T>& x) {
  const Vec<T> zero(T(0));
#if defined(__aarch64__)
  // Of two zeros, NEON's maximum is the positive one.
  return Vec<T>::blendv(x, zero, x < zero);
#else
  // The maximum of two equal zeros is the second one.
  return at::vec::maximum(zero, x);
#endif
}

constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
constexpr double kGeluCubic = 0.044715;

template <typename T>
inline Vec<T> gelu_tanh_inner(const Vec<T>& x) {
  return Vec<T>(T(kSqrtTwoOverPi)) * (x + Vec<T>(T(kGeluCubic)) * x * x * x);
}

// Of PyTorch's hard sigmoid; NaN stays NaN.
template <typename T>
inline Vec<T> sixths(const Vec<T>& x) {
  return at::vec::minimum(at::vec::maximum(x + Vec<T>(T(3)), Vec<T>(T(0))), Vec<T>(T(6)));
}

#define TORCH_ORT_UNARY(name, expression)                    \
  template <typename T>                                      \
  struct name {                                              \
    static Vec<T> of(const Vec<T>& x) { return expression; } \
  };
#define TORCH_ORT_BINARY(name, expression)                                    \
  template <typename T>                                                       \
  struct name {                                                               \
    static Vec<T> of(const Vec<T>& x, const Vec<T>& y) { return expression; } \
  };
#define TORCH_ORT_TERNARY(name, expression)                                                    \
  template <typename T>                                                                        \
  struct name {                                                                                \
    static Vec<T> of(const Vec<T>& x, const Vec<T>& y, const Vec<T>& z) { return expression; } \
  };

TORCH_ORT_UNARY(Copy, x)
TORCH_ORT_UNARY(Neg, x.neg())
TORCH_ORT_UNARY(Abs, x.abs())
TORCH_ORT_UNARY(Exp, exp(x))
TORCH_ORT_UNARY(Log, x.log())
TORCH_ORT_UNARY(Log1p, x.log1p())
TORCH_ORT_UNARY(Sqrt, x.sqrt())
TORCH_ORT_UNARY(Reciprocal, one<T>() / x)
TORCH_ORT_UNARY(Tanh, tanh(x))
TORCH_ORT_UNARY(Erf, erf(x))
TORCH_ORT_UNARY(Sigmoid, sigmoid(x))
TORCH_ORT_UNARY(Relu, relu(x))
TORCH_ORT_UNARY(Floor, x.floor())
TORCH_ORT_UNARY(Ceil, x.ceil())
TORCH_ORT_UNARY(Round, x.round())
TORCH_ORT_UNARY(Trunc, x.trunc())
TORCH_ORT_UNARY(Sign, x.gt(Vec<T>(T(0))) - x.lt(Vec<T>(T(0))))
TORCH_ORT_UNARY(Sin, x.sin())
TORCH_ORT_UNARY(Cos, x.cos())
TORCH_ORT_UNARY(Not, x.eq(Vec<T>(T(0))))
TORCH_ORT_UNARY(IsNan, x.ne(x))
TORCH_ORT_UNARY(ToBool, truth(x))
TORCH_ORT_UNARY(Gelu, (x * normal_cdf(x)))
TORCH_ORT_UNARY(GeluTanh, Vec<T>(T(0.5)) * x * (one<T>() + tanh(gelu_tanh_inner(x))))
TORCH_ORT_UNARY(Silu, x / (one<T>() + exp(x.neg())))
TORCH_ORT_UNARY(HardSwish, x* sixths(x) * Vec<T>(T(1.0 / 6)))

// Rounds to the nearest number of a 16-bit type.
template <typename Short, typename T>
inline Vec<T> rounded_to(const Vec<T>& x) {
  T numbers[Vec<T>::size()];
  x.store(numbers);
  for (T& number : numbers) {
    number = static_cast<T>(static_cast<float>(Short(static_cast<float>(number))));
  }
  return Vec<T>::loadu(numbers);
}
TORCH_ORT_UNARY(ToBFloat16, rounded_to<c10::BFloat16>(x))
TORCH_ORT_UNARY(ToHalf, rounded_to<c10::Half>(x))

TORCH_ORT_BINARY(Add, x + y)
TORCH_ORT_BINARY(Sub, x - y)
TORCH_ORT_BINARY(Mul, (x * y))
TORCH_ORT_BINARY(Div, x / y)
TORCH_ORT_BINARY(Pow, x.pow(y))
TORCH_ORT_BINARY(Max, at::vec::maximum(x, y))
TORCH_ORT_BINARY(Min, at::vec::minimum(x, y))
TORCH_ORT_BINARY(Equal, x.eq(y))
TORCH_ORT_BINARY(Less, x.lt(y))
TORCH_ORT_BINARY(LessOrEqual, x.le(y))
TORCH_ORT_BINARY(Greater, x.gt(y))
TORCH_ORT_BINARY(GreaterOrEqual, x.ge(y))
TORCH_ORT_BINARY(And, truth(x) * truth(y))
TORCH_ORT_BINARY(Or, at::vec::maximum(truth(x), truth(y)))
TORCH_ORT_BINARY(Xor, truth(x).ne(truth(y)))

// x is the gradient of the result; y is the input, or the result where that is simpler.
TORCH_ORT_BINARY(GeluGrad, (x * (normal_cdf(y) + y * normal_pdf(y))))
template <typename T>
struct GeluTanhGrad {
  static Vec<T> of(const Vec<T>& x, const Vec<T>& y) {
    const Vec<T> half(T(0.5)), tangent = tanh(gelu_tanh_inner(y));
    const Vec<T> slope = Vec<T>(T(kSqrtTwoOverPi)) * (one<T>() + Vec<T>(T(3 * kGeluCubic)) * y * y);
    return x * (half * (one<T>() + tangent) + half * y * (one<T>() - tangent * tangent) * slope);
  }
};
template <typename T>
struct SiluGrad {
  static Vec<T> of(const Vec<T>& x, const Vec<T>& y) {
    const Vec<T> s = sigmoid(y);
    return x * s * (one<T>() + y * (one<T>() - s));
  }
};
// At the bends, and where the input is NaN, gradients are those of PyTorch's kernel.
template <typename T>
struct HardSwishGrad {
  static Vec<T> of(const Vec<T>& x, const Vec<T>& y) {
    const Vec<T> slope = at::vec::fmadd(y, Vec<T>(T(1.0 / 3)), Vec<T>(T(0.5)));
    const Vec<T> curved = Vec<T>::blendv(x, x * slope, y < Vec<T>(T(3)));
    return Vec<T>::blendv(curved, Vec<T>(T(0)), y <= Vec<T>(T(-3)));
  }
};
TORCH_ORT_BINARY(TanhGrad, (x * (one<T>() - y * y)))
TORCH_ORT_BINARY(SigmoidGrad, (x * (one<T>() - y) * y))

// x times 1 or the slope. NaN is not above 0 and so takes the slope, as in PyTorch.
template <typename T>
inline Vec<T> leaky(const Vec<T>& x, const Vec<T>& input, const Vec<T>& slope) {
  return x * Vec<T>::blendv(slope, one<T>(), input > Vec<T>(T(0)));
}
TORCH_ORT_BINARY(LeakyRelu, leaky(x, x, y))
TORCH_ORT_TERNARY(LeakyReluGrad, leaky(x, y, z))

TORCH_ORT_TERNARY(Where, Vec<T>::blendv(z, y, mask(x)))
TORCH_ORT_TERNARY(MulAdd, at::vec::fmadd(x, y, z))
// The gradient passes where the input is NaN, as in PyTorch.
TORCH_ORT_TERNARY(ThresholdGrad, Vec<T>::blendv(x, Vec<T>(T(0)), y <= z))

#undef TORCH_ORT_UNARY
#undef TORCH_ORT_BINARY
#undef TORCH_ORT_TERNARY

}  // namespace
}  // namespace torch_ort::cpu
