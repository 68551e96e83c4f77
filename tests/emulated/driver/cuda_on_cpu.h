// CUDA C++ text as C++ for a CPU: the fake NVRTC puts this header before it. Each thread of a block
// is a fiber; they take turns on one thread of the system, in an order that EMULATED_CUDA_ORDER
// tells (threads.h).
//
// The text may ask for EMULATED_CUDA where inline PTX stands, and says EMULATED_SHARED(name) for
// `extern __shared__ char name[]`. Static __shared__ variables work, but are not poisoned.
#pragma once

#include "block.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define EMULATED_CUDA 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static thread_local
#define __constant__ static const
#define __grid_constant__
#define EMULATED_SHARED(name) char* const name = ::emulated::now->shared

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};

namespace emulated {

template <typename T>
T lane_value(int lane, unsigned turn) {
  T value;
  read(lane, turn, &value, sizeof(T));
  return value;
}

// --- warps
// ----------------------------------------------------------------------------------------

template <typename T>
T shuffle(int site, unsigned mask, T value, int source, int width = 32) {
  const unsigned turn = meet(mask, &value, sizeof(T), site);
  return lane_value<T>(now->lane / width * width + (source & (width - 1)), turn);
}
// What a lane gets that has no partner in its part of the warp is its own value.
template <typename T>
T shuffle_to(int site, unsigned mask, T value, int other, int width) {
  const unsigned turn = meet(mask, &value, sizeof(T), site);
  if (other < 0 || other / width != now->lane / width) return value;
  if ((mask >> other & 1) == 0) fail("a shuffle reads a lane that is not in its mask");
  return lane_value<T>(other, turn);
}
template <typename T>
T shuffle_xor(int site, unsigned mask, T value, int bits, int width = 32) {
  return shuffle_to(site, mask, value, now->lane ^ bits, width);
}
template <typename T>
T shuffle_down(int site, unsigned mask, T value, unsigned delta, int width = 32) {
  return shuffle_to(site, mask, value, now->lane + static_cast<int>(delta), width);
}
template <typename T>
T shuffle_up(int site, unsigned mask, T value, unsigned delta, int width = 32) {
  return shuffle_to(site, mask, value, now->lane - static_cast<int>(delta), width);
}
inline unsigned ballot(int site, unsigned mask, int predicate) {
  const unsigned turn = meet(mask, &predicate, sizeof(predicate), site);
  unsigned bits = 0;
  for (int lane = 0; lane < lanes_of_warp(); ++lane) {
    if ((mask >> lane & 1) != 0 && lane_value<int>(lane, turn) != 0) bits |= 1u << lane;
  }
  return bits;
}
inline void sync_warp(int site, unsigned mask = 0xFFFFFFFF) {
  const int nothing = 0;
  meet(mask, &nothing, sizeof(nothing), site);
}

// --- kernels by name, for cuLaunchKernel
// ----------------------------------------------------------

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(values[I])...);
}
template <typename... A>
void call(void (*kernel)(A...), void** values) {
  call(kernel, values, std::index_sequence_for<A...>());
}
template <typename... A>
int describe(void (*)(A...), Parameter* parameters) {
  int count = 0;
  const auto add = [&](Parameter each) {
    if (parameters != nullptr) parameters[count] = each;
    ++count;
  };
  (add({static_cast<int>(sizeof(A)), std::is_pointer_v<A>}), ...);
  return count;
}

}  // namespace emulated

// What the fake driver looks for behind a text.
#define EMULATED_KERNEL(name, most_threads)                                            \
  extern "C" __attribute__((visibility("default"))) void name##__call(void** values) { \
    ::emulated::call(name, values);                                                    \
  }                                                                                    \
  extern "C" __attribute__((visibility("default"))) int name##__describe(              \
      ::emulated::Parameter* parameters, int* bound) {                                 \
    *bound = most_threads;                                                             \
    return ::emulated::describe(name, parameters);                                     \
  }

#define threadIdx (::emulated::now->thread)
#define blockIdx (::emulated::now->block)
#define blockDim (::emulated::now->block_dim)
#define gridDim (::emulated::now->grid_dim)
constexpr int warpSize = 32;
#define __syncthreads() ::emulated::barrier(__LINE__)
#define __syncwarp(...) ::emulated::sync_warp(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) ::emulated::shuffle(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::emulated::shuffle_xor(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) ::emulated::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) ::emulated::shuffle_up(__LINE__, __VA_ARGS__)
#define __ballot_sync(...) ::emulated::ballot(__LINE__, __VA_ARGS__)
#define __any_sync(...) (::emulated::ballot(__LINE__, __VA_ARGS__) != 0)
inline void __threadfence() {}
inline void __threadfence_block() {}

// --- atomics: fibers change hands at barriers alone
// -----------------------------------------------

template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return std::exchange(*address, value);
}
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return std::exchange(*address, static_cast<T>(*address + value));
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return std::exchange(*address, *address > value ? *address : value);
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return std::exchange(*address, *address == expected ? value : *address);
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return std::exchange(*address, *address >= limit ? 0u : *address + 1);
}

// --- numbers
// --------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
// The quotient is a product with the reciprocal, which is 0 where it would be subnormal.
inline float __fdividef(float x, float y) {
  const float reciprocal = 1.0f / y;
  return fabsf(reciprocal) < 1.17549435e-38f ? x * copysignf(0.0f, y) : x / y;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32) | low) >>
                               (shift % 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline float __uint_as_float(unsigned x) {
  float result;
  memcpy(&result, &x, sizeof(x));
  return result;
}
inline unsigned __float_as_uint(float x) {
  unsigned result;
  memcpy(&result, &x, sizeof(x));
  return result;
}
template <typename T>
inline T __ldg(const T* address) {
  return *address;
}
template <typename T>
inline T __ldcs(const T* address) {
  return *address;
}
template <typename T>
inline void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
