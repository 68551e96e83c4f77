// Vectors of float32 from numbers that are bfloat16 or float16 in memory, and back. A part of
// kernels_loops.h; everything here has internal linkage for the reason given there.
#pragma once

#include "cpu/product_loops.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torch_ort::cpu {
namespace {

// As many numbers of 16 bits as a vector of float32 has lanes, and their bits one by one.
using ShortBits [[gnu::vector_size(2 * kLanesOf<float>)]] = uint16_t;
using FloatBits = Vector<uint32_t>;

template <typename T, typename S>
inline Vector<T> load_as(const S* from) {
  if constexpr (std::is_same_v<S, T>) {
    return load_vector(from);
  } else if constexpr (std::is_same_v<S, c10::BFloat16>) {
    ShortBits bits;
    std::memcpy(&bits, from, sizeof(bits));
    return reinterpret_cast<Vector<float>>(__builtin_convertvector(bits, FloatBits) << 16);
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    float numbers[kLanesOf<float>];
    for (int i = 0; i < kLanesOf<float>; ++i) numbers[i] = static_cast<float>(from[i]);
    return load_vector(numbers);
#endif
  }
}

// Rounds to the nearest, and to even numbers in the middle.
template <typename T, typename S>
inline void store_as(S* to, const Vector<T>& vector) {
  if constexpr (std::is_same_v<S, T>) {
    store_vector(to, vector);
  } else if constexpr (std::is_same_v<S, c10::BFloat16>) {
    constexpr uint32_t kNaN = 0x7FC0, kBelowHalf = 0x7FFF;
    const auto bits = reinterpret_cast<FloatBits>(vector);
    const FloatBits rounded = (bits + ((bits >> 16) & 1) + kBelowHalf) >> 16;
    const ShortBits shorts =
        __builtin_convertvector(vector == vector ? rounded : FloatBits{} + kNaN, ShortBits);
    std::memcpy(to, &shorts, sizeof(shorts));
  } else {
#if defined(CPU_CAPABILITY_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(CPU_CAPABILITY_AVX2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < kLanesOf<float>; ++i) to[i] = static_cast<S>(vector[i]);
#endif
  }
}

// The first `count` numbers; the others are zero.
template <typename T, typename S>
inline Vector<T> load_part_as(const S* from, int64_t count) {
  if constexpr (std::is_same_v<S, T>) return load_part(from, count);
  S numbers[kLanesOf<T>] = {};
  for (int64_t i = 0; i < count; ++i) numbers[i] = from[i];
  return load_as<T>(numbers);
}

template <typename T, typename S>
inline void store_part_as(S* to, const Vector<T>& vector, int64_t count) {
  if constexpr (std::is_same_v<S, T>) return store_part(to, vector, count);
  S numbers[kLanesOf<T>];
  store_as<T>(numbers, vector);
  for (int64_t i = 0; i < count; ++i) to[i] = numbers[i];
}

}  // namespace
}  // namespace torch_ort::cpu
