// e^x, tanh by it, and erf of float32 in registers. A part of kernels_loops.h; everything here has
// internal linkage for the reason given there.
//
// ATen's vectors call a library for the first two, which takes 23 cycles for the e^x of 16 numbers
// and 120 for their tanh, and before each call everything leaves the registers.
//
// e^x is 2^n e^r with an integer n and |r| <= ln(2) / 2 (Cody and Waite), and e^r - 1 a polynomial,
// the Chebyshev approximation of (e^r - 1 - r) / r^2 times r^2 plus r. e^x is off by at most 1.1
// units in the last place, tanh and erf by 3.
#pragma once

#include "cpu/product_loops.h"

#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <type_traits>

namespace torch_ort::cpu {
namespace {

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_NEON)
constexpr bool kHasOwnExponential = true;
#else
constexpr bool kHasOwnExponential = false;  // ATen's vectors are arrays there
#endif

using Floats = Vector<float>;
using Integers [[gnu::vector_size(Register<float>::kBytes)]] = int32_t;

// A number whose lowest bits are those of n if the integer n, of either sign, is added.
constexpr float kShift = 12582912.0F;
constexpr int32_t kShiftBits = 0x4B400000;

// e^x = 2^n (1 + more).
struct Exponential {
  Integers n;
  Floats more;
};

inline Exponential exponential_of(const Floats& x) {
  constexpr float log2_of_e = 1.44269504088896F;
  // Their sum is ln(2). The first has so few digits that n times it is exact, whether or not the
  // compiler multiplies and subtracts at once.
  constexpr float ln2 = 0.693359375F, ln2_rest = -2.12194440055e-04F;
  const Floats shifted = x * log2_of_e + kShift;
  const Floats n = shifted - kShift;
  Floats r = x - n * ln2;
  r = r - n * ln2_rest;
  Floats ratio = r * 0.0001989950833F + 0.0013933823211F;
  ratio = ratio * r + 0.0083332983777F;
  ratio = ratio * r + 0.0416664630175F;
  ratio = ratio * r + 0.1666666716337F;
  ratio = ratio * r + 0.5F;
  return {reinterpret_cast<Integers>(shifted) - kShiftBits, ratio * (r * r) + r};
}

// For n from -126 to 127.
inline Floats power_of_two(const Integers& n) { return reinterpret_cast<Floats>((n + 127) << 23); }

inline Floats exponential(const Floats& x) {
  constexpr float most = 89.5F, least = -104.0F;  // e^x is infinite above, and 0 below
  Floats within = x > most ? Floats{} + most : x;
  within = x < least ? Floats{} + least : within;
  const auto [n, more] = exponential_of(within);
  const Floats of_rest = x < least ? Floats{} : more + 1.0F;
  // The power itself may be no number of its own.
  const Integers half = n >> 1;
  return of_rest * power_of_two(half) * power_of_two(n - half);
}

inline Floats magnitude(const Floats& x) {
  return reinterpret_cast<Floats>(reinterpret_cast<Integers>(x) & INT32_MAX);
}

// With y = |2 x|, it is (e^y - 1) / (e^y + 1). Near 0, where n is 0, no digit of e^y - 1 is lost.
inline Floats hyperbolic_tangent(const Floats& x) {
  constexpr int32_t sign = INT32_MIN;
  constexpr float most = 20.0F;  // the result is 1 above
  const auto bits = reinterpret_cast<Integers>(x);
  Floats y = magnitude(x);
  y = y + y;
  y = y > most ? Floats{} + most : y;
  const auto [n, more] = exponential_of(y);
  const Floats power = power_of_two(n);
  const Floats less_one = power * more + (power - 1.0F);
  const Floats result = less_one / (less_one + 2.0F);
  return reinterpret_cast<Floats>(reinterpret_cast<Integers>(result) | (bits & sign));
}

// e^x for x of at most 0; 0 where that is less than 1e-34.
inline Floats falling_exponential(const Floats& x) {
  constexpr float least = -80.0F;
  const auto [n, more] = exponential_of(x < least ? Floats{} + least : x);
  return x < least ? Floats{} : (more + 1.0F) * power_of_two(n);
}

// The integral of the normal distribution from x on, for x >= 0, by its density: (1 - erf(z)) / 2
// with z = x / sqrt(2). Divided by e^(-z * z) and by t = 1 / (1 + 0.4 z), it is a polynomial in t
// (Hastings, "Approximations for digital computers"), whose greatest error times those is least,
// 1.4e-8.
inline Floats normal_tail(const Floats& z, const Floats& exponential_of_square) {
  const Floats t = 1.0F / (z * 0.4F + 1.0F);
  Floats ratio = t * -0.100129866F + 0.354574659F;
  ratio = ratio * t - 0.185455586F;
  ratio = ratio * t + 0.234138389F;
  ratio = ratio * t + 0.0809112589F;
  ratio = ratio * t + 0.11596113F;
  return ratio * (t * exponential_of_square);
}

// Near 0, where 1 less the rest would lose digits, erf(x) / x is a polynomial in x * x whose
// greatest relative error is least, 4e-8.
constexpr float kNearZero = 0.7F;
constexpr float kErrorFunction[] = {0.004281796896F, -0.02647447789F, 0.1127699901F, -0.3761222165F,
                                    1.128379126F};

inline Floats error_function(const Floats& x) {
  const Floats square = x * x;
  Floats ratio = square * kErrorFunction[0] + kErrorFunction[1];
  ratio = ratio * square + kErrorFunction[2];
  ratio = ratio * square + kErrorFunction[3];
  ratio = ratio * square + kErrorFunction[4];
  const Floats size = magnitude(x), tail = normal_tail(size, falling_exponential(-square));
  const Floats rest = 1.0F - (tail + tail);
  return size < kNearZero ? x * ratio : (x < 0.0F ? -rest : rest);
}

inline Floats normal_distribution(const Floats& x) {
  constexpr float sqrt_half = 0.707106781F;
  const Floats tail = normal_tail(magnitude(x) * sqrt_half, falling_exponential(x * x * -0.5F));
  return x < 0.0F ? tail : 1.0F - tail;
}

inline Floats normal_density(const Floats& x) {
  constexpr float inverse_sqrt_two_pi = 0.398942280F;
  return falling_exponential(x * x * -0.5F) * inverse_sqrt_two_pi;
}

template <typename T>
inline at::vec::Vectorized<T> exp(const at::vec::Vectorized<T>& x) {
  if constexpr (std::is_same_v<T, float> && kHasOwnExponential) {
    return exponential(static_cast<Floats>(x));
  } else {
    return x.exp();
  }
}

template <typename T>
inline at::vec::Vectorized<T> tanh(const at::vec::Vectorized<T>& x) {
  if constexpr (std::is_same_v<T, float> && kHasOwnExponential) {
    return hyperbolic_tangent(static_cast<Floats>(x));
  } else {
    return x.tanh();
  }
}

// Of float32 without registers, ATen's erf loses all digits near 0.
template <typename T>
inline at::vec::Vectorized<T> erf(const at::vec::Vectorized<T>& x) {
  using Vec = at::vec::Vectorized<T>;
  if constexpr (std::is_same_v<T, float> && kHasOwnExponential) {
    return error_function(static_cast<Floats>(x));
  } else if constexpr (std::is_same_v<T, float>) {
    const Vec square = x * x;
    Vec ratio(0.0F);
    for (float each : kErrorFunction) ratio = at::vec::fmadd(ratio, square, Vec(each));
    return Vec::blendv(x.erf(), x * ratio, x.abs() < Vec(kNearZero));
  } else {
    return x.erf();
  }
}

// The integral of the density of the normal distribution up to x.
template <typename T>
inline at::vec::Vectorized<T> normal_cdf(const at::vec::Vectorized<T>& x) {
  using Vec = at::vec::Vectorized<T>;
  if constexpr (std::is_same_v<T, float> && kHasOwnExponential) {
    return normal_distribution(static_cast<Floats>(x));
  } else {
    constexpr double sqrt_half = 0.70710678118654752440;
    return Vec(T(0.5)) * (Vec(T(1)) + (x * Vec(T(sqrt_half))).erf());
  }
}

template <typename T>
inline at::vec::Vectorized<T> normal_pdf(const at::vec::Vectorized<T>& x) {
  using Vec = at::vec::Vectorized<T>;
  if constexpr (std::is_same_v<T, float> && kHasOwnExponential) {
    return normal_density(static_cast<Floats>(x));
  } else {
    constexpr double inverse_sqrt_two_pi = 0.39894228040143267794;
    return Vec(T(inverse_sqrt_two_pi)) * exp(Vec(T(-0.5)) * x * x);
  }
}

}  // namespace
}  // namespace torch_ort::cpu
