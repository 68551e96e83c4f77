// The loops of kernels.h, written with ATen's vector types. Each kernels_<isa>.cpp includes this
// file once and is compiled for its instruction set. Everything here has internal linkage, so that
// the linker cannot put code of one instruction set into another file, which might run on a
// processor without it.
#pragma once

#include "cpu/cell_loops.h"
#include "cpu/few_rows_loops.h"
#include "cpu/kernels.h"
#include "cpu/pointwise_loops.h"
#include "cpu/product_loops.h"
#include "cpu/short_loops.h"
#include "cpu/winograd_loops.h"

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

namespace torch_ort::cpu {
namespace {

// The results of the first kCount vectors, of a power of two of them, in pairs.
template <int kCount, typename T, typename Combine>
inline Vec<T> combined(const Vec<T>* vectors, Combine combine) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
    return combine(combined<kCount / 2, T>(vectors, combine),
                   combined<kCount / 2, T>(vectors + kCount / 2, combine));
  }
}

// Uses several partial results, so that consecutive steps do not depend on each other, and that a
// sum of many numbers is one of shorter sums.
template <typename T, typename Combine>
inline T reduce(const T* a, int64_t n, T start, Combine combine) {
  constexpr int64_t width = Vec<T>::size();
  constexpr int partials = sizeof(Vec<T>) <= 16 ? 8 : 4;
  Vec<T> partial[partials];
  for (Vec<T>& each : partial) each = Vec<T>(start);
  int64_t i = 0;
  for (; i + partials * width <= n; i += partials * width) {
    for (int k = 0; k < partials; ++k) {
      partial[k] = combine(partial[k], Vec<T>::loadu(a + i + k * width));
    }
  }
  for (; i + width <= n; i += width) partial[0] = combine(partial[0], Vec<T>::loadu(a + i));
  if (i < n) {
    const Vec<T> rest = Vec<T>::set(Vec<T>(start), Vec<T>::loadu(a + i, n - i), n - i);
    partial[1] = combine(partial[1], rest);
  }
  return at::vec::vec_reduce_all<T>(combine, combined<partials, T>(partial, combine));
}

template <typename T>
void sum_rows(T* d, const T* a, int64_t rows, int64_t n) {
  const auto add = [](const Vec<T>& x, const Vec<T>& y) { return x + y; };
  for (int64_t r = 0; r < rows; ++r) d[r] += reduce(a + r * n, n, T(0), add);
}

template <typename T>
void max_rows(T* d, const T* a, int64_t rows, int64_t n) {
  const auto larger = [](const Vec<T>& x, const Vec<T>& y) { return at::vec::maximum(x, y); };
  for (int64_t r = 0; r < rows; ++r) d[r] = reduce(a + r * n, n, d[r], larger);
}

template <typename T>
void min_rows(T* d, const T* a, int64_t rows, int64_t n) {
  const auto smaller = [](const Vec<T>& x, const Vec<T>& y) { return at::vec::minimum(x, y); };
  for (int64_t r = 0; r < rows; ++r) d[r] = reduce(a + r * n, n, d[r], smaller);
}

// kVectors vectors of columns stay in registers while all rows are added to them. Each addition
// waits for the one before to the same column, so that a few columns take as long as one.
template <typename T, int kVectors>
inline void add_columns(T* d, const T* a, int64_t rows, int64_t n) {
  constexpr int64_t width = Vec<T>::size();
  Vec<T> sums[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sums[v] = Vec<T>::loadu(d + v * width);
  for (int64_t r = 0; r < rows; ++r, a += n) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = sums[v] + Vec<T>::loadu(a + v * width);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sums[v].store(d + v * width);
}

template <typename T>
void add_rows(T* d, const T* a, int64_t rows, int64_t n) {
  constexpr int64_t width = Vec<T>::size();
  int64_t i = 0;
  for (; i + 4 * width <= n; i += 4 * width) add_columns<T, 4>(d + i, a + i, rows, n);
  for (; i + width <= n; i += width) add_columns<T, 1>(d + i, a + i, rows, n);
  if (i == n) return;
  Vec<T> sums = Vec<T>::loadu(d + i, n - i);
  for (int64_t r = 0; r < rows; ++r) sums = sums + Vec<T>::loadu(a + r * n + i, n - i);
  sums.store(d + i, static_cast<int>(n - i));
}

template <typename T>
void expand_rows(T* d, const T* a, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    const Vec<T> number(a[r]);
    for_each_vector<T>(n, [&](int64_t i, int64_t count) { put(d + r * n, i, count, number); });
  }
}

// ATen's fast exp, which returns NaN for NaN here.
template <typename T>
inline Vec<T> fast_exp(const Vec<T>& x) {
  return Vec<T>::blendv(x.exp_u20(), x, x != x);
}

template <typename T>
T exp_row(T* d, const T* a, T shift, int64_t n) {
  constexpr int64_t width = Vec<T>::size();
  const Vec<T> shifts(shift);
  Vec<T> sums(T(0));
  int64_t i = 0;
  for (; i + width <= n; i += width) {
    const Vec<T> x = fast_exp(Vec<T>::loadu(a + i) - shifts);
    x.store(d + i);
    sums = sums + x;
  }
  if (i < n) {
    const Vec<T> x = fast_exp(Vec<T>::loadu(a + i, n - i) - shifts);
    x.store(d + i, static_cast<int>(n - i));
    sums = sums + Vec<T>::set(Vec<T>(T(0)), x, n - i);
  }
  return at::vec::vec_reduce_all<T>([](const Vec<T>& x, const Vec<T>& y) { return x + y; }, sums);
}

template <typename T>
inline Vec<T> get(const T* a, int64_t i, int64_t count) {
  return Operand<T, false>(a).at(i, count);
}

template <typename T>
void sgd(T* parameter, const T* gradient, T* buffer, int64_t n, const SgdRule& rule) {
  const Vec<T> sign(rule.maximize ? T(-1) : T(1)), decay(static_cast<T>(rule.weight_decay));
  const Vec<T> momentum(static_cast<T>(rule.momentum)), minus_lr(static_cast<T>(-rule.lr));
  const Vec<T> undamped(static_cast<T>(1 - rule.dampening));
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    const Vec<T> x = get(parameter, i, count);
    Vec<T> change = get(gradient, i, count) * sign;
    if (rule.weight_decay != 0) change = at::vec::fmadd(decay, x, change);
    if (buffer != nullptr) {
      Vec<T> kept = change;
      if (!rule.is_first) {
        kept = at::vec::fmadd(undamped, change, get(buffer, i, count) * momentum);
      }
      put(buffer, i, count, kept);
      change = rule.nesterov ? at::vec::fmadd(momentum, kept, change) : kept;
    }
    put(parameter, i, count, at::vec::fmadd(minus_lr, change, x));
  });
}

// A factor as the sum of two numbers of its sign. Running means and decayed parameters change
// little in each of many steps, so that the rounding error of the factor would accumulate: x *
// 0.999f is x * 0.99900001. The first number is smaller than the factor, so that an infinite x
// stays infinite.
template <typename T>
struct Factor {
  explicit Factor(double value) {
    T rounded = static_cast<T>(value);
    if (std::abs(static_cast<double>(rounded)) >= std::abs(value)) {
      rounded = std::nextafter(rounded, T(0));
    }
    high = Vec<T>(rounded);
    low = Vec<T>(static_cast<T>(value - static_cast<double>(rounded)));
  }
  // x * value + y
  Vec<T> multiply_add(const Vec<T>& x, const Vec<T>& y) const {
    return at::vec::fmadd(x, high, at::vec::fmadd(x, low, y));
  }
  Vec<T> high, low;
};

// The running means of a gradient and of its square.
template <typename T>
struct Means {
  Means(double beta1, double beta2)
      : beta1_rest(static_cast<T>(1 - beta1)),
        beta2_rest(static_cast<T>(1 - beta2)),
        beta2(beta2) {}
  Vec<T> mean(const Vec<T>& old, const Vec<T>& g) const {
    return at::vec::fmadd(beta1_rest, g - old, old);
  }
  Vec<T> square(const Vec<T>& old, const Vec<T>& g) const {
    return beta2.multiply_add(old, beta2_rest * g * g);
  }
  Vec<T> beta1_rest, beta2_rest;
  Factor<T> beta2;
};

// Prefetches memory that an optimizer step reads soon. With four or more streams the processor does
// not predict the next page of each. Half a page ahead was fastest: 0.9 of the time without.
template <typename T, typename... Arrays>
inline void fetch_ahead(int64_t i, const Arrays*... arrays) {
  constexpr int64_t kAhead = 2048 / sizeof(T);
  (__builtin_prefetch(arrays + i + kAhead), ...);
}

template <typename T>
void adam(T* parameter, const T* gradient, T* mean, T* square, T* largest, int64_t n,
          const AdamRule& rule) {
  const Vec<T> gradient_factor(static_cast<T>(rule.gradient_factor));
  const Vec<T> decay(static_cast<T>(rule.weight_decay)), eps(static_cast<T>(rule.eps));
  const Vec<T> minus_step_size(static_cast<T>(-rule.step_size));
  const Means<T> means(rule.beta1, rule.beta2);
  const Factor<T> keep(rule.keep);
  const Vec<T> inverse_correction(static_cast<T>(rule.inverse_correction));
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    fetch_ahead<T>(i, parameter, gradient, mean, square);
    const Vec<T> x = get(parameter, i, count);
    Vec<T> g = get(gradient, i, count) * gradient_factor;
    if (rule.weight_decay != 0) g = at::vec::fmadd(decay, x, g);
    const Vec<T> new_mean = means.mean(get(mean, i, count), g);
    put(mean, i, count, new_mean);
    Vec<T> squares = means.square(get(square, i, count), g);
    put(square, i, count, squares);
    if (largest != nullptr) {
      squares = at::vec::maximum(get(largest, i, count), squares);
      put(largest, i, count, squares);
    }
    const Vec<T> divisor = at::vec::fmadd(squares.sqrt(), inverse_correction, eps);
    const Vec<T> step = new_mean / divisor;
    put(parameter, i, count,
        rule.keep == 1 ? at::vec::fmadd(minus_step_size, step, x)
                       : keep.multiply_add(x, minus_step_size * step));
  });
}

template <typename T>
void lamb(T* direction, const T* parameter, const T* gradient, T* mean, T* square, int64_t n,
          const LambRule& rule) {
  const Vec<T> gradient_factor(static_cast<T>(rule.gradient_factor));
  const Vec<T> decay(static_cast<T>(rule.weight_decay)), eps(static_cast<T>(rule.eps));
  const Vec<T> mean_correction(static_cast<T>(rule.mean_correction));
  const Vec<T> inverse_correction(static_cast<T>(rule.inverse_correction));
  const Means<T> means(rule.beta1, rule.beta2);
  for_each_vector<T>(n, [&](int64_t i, int64_t count) {
    fetch_ahead<T>(i, parameter, mean, square);
    Vec<T> m = get(mean, i, count), squares = get(square, i, count);
    if (gradient != nullptr) {
      const Vec<T> g = get(gradient, i, count) * gradient_factor;
      m = means.mean(m, g);
      squares = means.square(squares, g);
      put(mean, i, count, m);
      put(square, i, count, squares);
    }
    Vec<T> r = m * mean_correction / at::vec::fmadd(squares.sqrt(), inverse_correction, eps);
    if (rule.weight_decay != 0) r = at::vec::fmadd(decay, get(parameter, i, count), r);
    put(direction, i, count, r);
  });
}

template <typename T>
double sum_squares(const T* a, int64_t n) {
  constexpr int64_t kSums = 32;
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t j = 0; j < kSums; ++j) {
      const double x = static_cast<double>(a[i + j]);
      sums[j] += x * x;
    }
  }
  for (int64_t j = 0; i < n; ++i, ++j) {
    const double x = static_cast<double>(a[i]);
    sums[j] += x * x;
  }
  double sum = 0;
  for (const double each : sums) sum += each;
  return sum;
}

// The sums converge to 2. They start with different numbers, none of them 2, because a compiler
// would otherwise see that a sum does not change or that two are equal.
template <typename T>
double multiply_and_add(int64_t rounds) {
  const Vector<T> half = Vector<T>{} + T(0.5), one = Vector<T>{} + T(1);
  Vector<T> sums[kRegisterSums];
#pragma GCC unroll 24
  for (int i = 0; i < kRegisterSums; ++i) sums[i] = Vector<T>{} + static_cast<T>(i + 3);
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 24
    for (int i = 0; i < kRegisterSums; ++i) sums[i] = sums[i] * half + one;
  }
  Vector<T> all = sums[0];
#pragma GCC unroll 24
  for (int i = 1; i < kRegisterSums; ++i) all += sums[i];
  double total = 0;
  for (int i = 0; i < Register<T>::kWidth; ++i) total += static_cast<double>(all[i]);
  return total;
}

template <typename T>
constexpr RegisterLoop kPeak = {multiply_and_add<T>, 2 * kRegisterSums * Register<T>::kWidth};

inline void copy_past_caches(char* to, const char* from, int64_t num_bytes) {
#if defined(__SSE2__)
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  for (int64_t i = 0; i < num_bytes / 16; ++i) _mm_stream_si128(target + i, source[i]);
  _mm_sfence();
#elif defined(__aarch64__)
  for (int64_t i = 0; i < num_bytes; i += 32) {
    asm volatile("ldnp q0, q1, [%1]; stnp q0, q1, [%0]"
                 :
                 : "r"(to + i), "r"(from + i)
                 : "v0", "v1", "memory");
  }
#else
  std::memcpy(to, from, static_cast<size_t>(num_bytes));
#endif
}

// Copies short runs here, since a call of memcpy takes longer than the copy.
template <typename T>
inline void copy_run(T* to, const T* from, int64_t n) {
  constexpr int64_t width = Vec<T>::size(), kLong = 16 * width;
  if (n < width || n >= kLong) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i + width < n; i += width) Vec<T>::loadu(from + i).store(to + i);
  Vec<T>::loadu(from + n - width).store(to + n - width);
}

template <typename To, typename From>
inline void convert_run(To* to, int64_t to_stride, const From* from, int64_t from_stride,
                        int64_t n) {
  if (to_stride == 1 && from_stride == 1) {
    if constexpr (std::is_same_v<To, From>) {
      copy_run(to, from, n);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i * to_stride] = static_cast<To>(from[i * from_stride]);
}

template <typename T, typename Memory>
void load(T* d, const void* source, const Runs& runs) {
  const auto* from = static_cast<const Memory*>(source);
  for (int64_t i = 0; i < runs.count; ++i) {
    convert_run(d + i * runs.n, 1, from + i * runs.distance, runs.stride, runs.n);
  }
}

template <typename T, typename Memory>
void store(void* target, const T* a, const Runs& runs) {
  auto* to = static_cast<Memory*>(target);
  for (int64_t i = 0; i < runs.count; ++i) {
    convert_run(to + i * runs.distance, runs.stride, a + i * runs.n, 1, runs.n);
  }
}

// Computes 64 random numbers: 16 counters in parallel, four numbers each. Element e of a stream is
// word e % 4 of counter e / 4, on every instruction set and on CUDA (csrc/cuda/prelude.cuh).
constexpr int kCounters = 16;
constexpr int64_t kPhiloxBlock = 4 * kCounters;

// A word of the generator is the lower half of a lane, since the product of two words fills a lane.
// What the upper halves contain does not matter.
using Words = Vector<uint64_t>;
constexpr int kWordLanes = kLanesOf<uint64_t>;

// The products of the lower halves.
inline Words multiply_words(const Words& a, const Words& b) {
#if defined(CPU_CAPABILITY_AVX512)
  return reinterpret_cast<Words>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(CPU_CAPABILITY_AVX2)
  return reinterpret_cast<Words>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(CPU_CAPABILITY_NEON)
  return (Words)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  constexpr uint64_t kLower = 0xFFFFFFFF;
  return (a & kLower) * (b & kLower);
#endif
}

// Lane 2j has the j-th counter, and lane 2j + 1 that of half the lanes later: then an exchange of
// lanes between vectors puts the four words of each counter side by side, in order of the counters.
template <int... kLane>
inline Words counters_from(uint64_t first, std::integer_sequence<int, kLane...> /*lanes*/) {
  constexpr Words kOffsets = {(kLane / 2 + kLane % 2 * (kWordLanes / 2))...};
  return first + kOffsets;
}

// Lanes of `a` and `b` in turns: 0, 2, 4... of each if `first` is 0, and 1, 3, 5... if it is 1.
template <int kFirst, int... kLane>
inline Words in_turns(const Words& a, const Words& b,
                      std::integer_sequence<int, kLane...> /*lanes*/) {
  return pick_lanes<(kLane / 2 * 2 + kFirst + kLane % 2 * kWordLanes)...>(a, b);
}

inline void philox_block(uint64_t seed, uint64_t stream, uint64_t block, uint32_t* numbers) {
  constexpr auto lanes = std::make_integer_sequence<int, kWordLanes>();
  constexpr int kVectors = kCounters / kWordLanes;
  Words x0[kVectors], x1[kVectors], x2[kVectors], x3[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    x0[v] = counters_from(block * kCounters + static_cast<uint64_t>(v * kWordLanes), lanes);
    x1[v] = x0[v] >> 32;
    x2[v] = Words{} + stream;
    x3[v] = x2[v] >> 32;
  }
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < kVectors; ++v) {
      const Words a = multiply_words(x0[v], Words{} + 0xD2511F53);
      const Words b = multiply_words(x2[v], Words{} + 0xCD9E8D57);
      x0[v] = (b >> 32) ^ x1[v] ^ key0;
      x1[v] = b;
      x2[v] = (a >> 32) ^ x3[v] ^ key1;
      x3[v] = a;
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  constexpr uint64_t kLower = 0xFFFFFFFF;
  for (int v = 0; v < kVectors; ++v) {
    const Words low = (x0[v] & kLower) | (x1[v] << 32), high = (x2[v] & kLower) | (x3[v] << 32);
    const Words pair[2] = {in_turns<0>(low, high, lanes), in_turns<1>(low, high, lanes)};
    std::memcpy(numbers + v * sizeof(pair) / sizeof(uint32_t), pair, sizeof(pair));
  }
}

template <typename T>
void random_mask(T* d, uint64_t seed, uint64_t stream, int64_t begin, int64_t n, double keep) {
  const double limit = keep * 4294967296.0;
  const uint32_t last = limit >= 4294967296.0 ? 0xFFFFFFFF : static_cast<uint32_t>(limit);
  uint32_t numbers[kPhiloxBlock];
  for (int64_t done = 0; done < n;) {
    const int64_t place = begin + done, first = place % kPhiloxBlock;
    const int64_t count = std::min(kPhiloxBlock - first, n - done);
    philox_block(seed, stream, static_cast<uint64_t>(place / kPhiloxBlock), numbers);
    for (int64_t i = 0; i < count; ++i) {
      d[done + i] = numbers[first + i] < last ? T(1) : T(0);
    }
    done += count;
  }
}

template <typename T, typename S, int kTaps, int kVectors>
inline void depthwise_taps(const DepthwiseRow<T, S>& row, int64_t first, int64_t channel) {
  T* sums = row.sums + first * kDepthwiseChannels + channel;
  const T* image = row.image + first * row.tap_step + channel;
  const S* gradient = row.gradient + channel;
  Vector<T> totals[kTaps][kVectors];
#pragma GCC unroll 8
  for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      totals[t][v] = load_vector(sums + t * kDepthwiseChannels + v * kLanesOf<T>);
    }
  }
  for (int64_t p = 0; p < row.places; ++p) {
    Vector<T> g[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) g[v] = load_as<T>(gradient + v * kLanesOf<T>);
#pragma GCC unroll 8
    for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        totals[t][v] += g[v] * load_vector(image + t * row.tap_step + v * kLanesOf<T>);
      }
    }
    gradient += row.gradient_step;
    image += row.image_step;
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store_vector(sums + t * kDepthwiseChannels + v * kLanesOf<T>, totals[t][v]);
    }
  }
}

// Few taps have few sums, each of which waits for the last addition to it; so two vectors of
// channels are added at once.
template <typename T, typename S, int kTaps>
inline void depthwise_taps(const DepthwiseRow<T, S>& row, int64_t first) {
  constexpr int width = kLanesOf<T>,
                vectors = kTaps <= 5 && 2 * width <= kDepthwiseChannels ? 2 : 1;
  for (int64_t channel = 0; channel < kDepthwiseChannels; channel += vectors * width) {
    depthwise_taps<T, S, kTaps, vectors>(row, first, channel);
  }
}

template <typename T, typename S>
void depthwise_row(const DepthwiseRow<T, S>& row) {
  for (int64_t first = 0; first < row.taps; first += 7) {
    switch (std::min<int64_t>(7, row.taps - first)) {
      case 1: depthwise_taps<T, S, 1>(row, first); break;
      case 2: depthwise_taps<T, S, 2>(row, first); break;
      case 3: depthwise_taps<T, S, 3>(row, first); break;
      case 4: depthwise_taps<T, S, 4>(row, first); break;
      case 5: depthwise_taps<T, S, 5>(row, first); break;
      case 6: depthwise_taps<T, S, 6>(row, first); break;
      default: depthwise_taps<T, S, 7>(row, first);
    }
  }
}

// Some places of a block of channels, which may not be whole.
template <typename T, typename S, int kPlaces, bool kIsWhole>
inline void depthwise_places(const DepthwiseResult<T, S>& it, int64_t first, int64_t block) {
  constexpr int width = kLanesOf<T>, vectors = static_cast<int>(kDepthwiseChannels) / width;
  const int64_t channel = block * kDepthwiseChannels, of_weights = block * it.block_step;
  const auto count = [&](int v) {
    return std::clamp<int64_t>(it.channels - channel - v * width, 0, width);
  };
  Vector<T> sums[kPlaces][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < kPlaces; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) sums[i][v] = load_vector(it.bias + of_weights + v * width);
  }
  const int64_t from = first * it.place_step + channel;
  for (int64_t t = 0; t < it.num_taps; ++t) {
    const S* const image = it.taps[t].image + from;
    const T* const weights = it.taps[t].weights + of_weights;
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const Vector<T> weight = load_vector(weights + v * width);
#pragma GCC unroll 8
      for (int i = 0; i < kPlaces; ++i) {
        const S* const pixel = image + i * it.place_step + v * width;
        sums[i][v] += (kIsWhole ? load_as<T>(pixel) : load_part_as<T>(pixel, count(v))) * weight;
      }
    }
  }
  S* to = it.result + first * it.result_step + channel;
#pragma GCC unroll 8
  for (int i = 0; i < kPlaces; ++i, to += it.result_step) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      if constexpr (kIsWhole) {
        store_as<T>(to + v * width, sums[i][v]);
      } else if (count(v) > 0) {
        store_part_as<T>(to + v * width, sums[i][v], count(v));
      }
    }
  }
}

template <typename T, typename S, int kPlaces>
inline void depthwise_blocks(const DepthwiseResult<T, S>& it, int64_t first) {
  int64_t block = 0;
  for (; (block + 1) * kDepthwiseChannels <= it.channels; ++block) {
    depthwise_places<T, S, kPlaces, true>(it, first, block);
  }
  if (block * kDepthwiseChannels < it.channels) {
    depthwise_places<T, S, kPlaces, false>(it, first, block);
  }
}

// As many places at once as there are registers for their sums. All channels of a place come before
// the next places, for they lie side by side in memory.
template <typename T, typename S>
void depthwise_result(const DepthwiseResult<T, S>& it) {
  constexpr int vectors = static_cast<int>(kDepthwiseChannels) / kLanesOf<T>;
  constexpr int together = std::clamp((kHasManyRegisters ? 16 : 8) / vectors, 1, 8);
  if (it.places < together) {
    for (int64_t place = 0; place < it.places; ++place) depthwise_blocks<T, S, 1>(it, place);
    return;
  }
  // The last ones overlap those before, and are the same numbers.
  for (int64_t first = 0; first < it.places; first += together) {
    depthwise_blocks<T, S, together>(it, std::min(first, it.places - together));
  }
}

// What of a strip of places exists.
enum class Strip : uint8_t { kInner, kAtEdge, kInPart };

// The places and vectors of channels whose sums, and all taps of a row, are in registers together.
// Few taps add to few sums, each of which waits for the last addition to it.
template <typename T, int kTaps>
constexpr int kStripVectors = kTaps <= 3 && 2 * kLanesOf<T> <= kDepthwiseChannels ? 2 : 1;
template <typename T, int kTaps>
constexpr int kStripPlaces = 8 / kStripVectors<T, kTaps>;

// Reads each pixel once. At an edge pixels may be outside of the image, and places may not exist;
// in part the channels, too.
template <typename T, typename S, int kTaps, int kStride, Strip kStrip>
inline void depthwise_strip(const DepthwiseWindows<T, S>& it, int64_t first, int64_t channel) {
  constexpr int places = kStripPlaces<T, kTaps>, vectors = kStripVectors<T, kTaps>;
  constexpr int width = kLanesOf<T>;
  const int64_t of_weights =
      channel / kDepthwiseChannels * it.block_step + channel % kDepthwiseChannels;
  const auto count = [&](int v) {
    return std::clamp<int64_t>(it.channels - channel - v * width, 0, width);
  };
  const int64_t begin = first * kStride + it.origin;
  Vector<T> sums[places][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < places; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) sums[i][v] = load_vector(it.bias + of_weights + v * width);
  }
  for (int64_t r = 0; r < it.num_rows; ++r) {
    const S* const image = it.rows[r].image + channel;
    const T* const weights = it.rows[r].weights + of_weights;
    Vector<T> taps[kTaps][vectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTaps; ++t) {
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        taps[t][v] = load_vector(weights + t * it.tap_step + v * width);
      }
    }
    int64_t offset = begin * it.pixel_step;
#pragma GCC unroll 32
    for (int i = 0; i < (places - 1) * kStride + kTaps; ++i, offset += it.pixel_step) {
      if (kStrip != Strip::kInner && (begin + i < 0 || begin + i >= it.pixels)) continue;
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        const S* const from = image + offset + v * width;
        const Vector<T> pixel =
            kStrip == Strip::kInPart ? load_part_as<T>(from, count(v)) : load_as<T>(from);
#pragma GCC unroll 8
        for (int t = 0; t < kTaps; ++t) {
          const int place = (i - t) / kStride;
          if (i >= t && (i - t) % kStride == 0 && place < places) {
            sums[place][v] += pixel * taps[t][v];
          }
        }
      }
    }
  }
  S* to = it.result + first * it.result_step + channel;
#pragma GCC unroll 8
  for (int i = 0; i < places; ++i, to += it.result_step) {
    if (kStrip != Strip::kInner && first + i >= it.places) break;
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      if constexpr (kStrip == Strip::kInPart) {
        if (count(v) > 0) store_part_as<T>(to + v * width, sums[i][v], count(v));
      } else {
        store_as<T>(to + v * width, sums[i][v]);
      }
    }
  }
}

template <typename T, typename S, int kTaps, int kStride>
void depthwise_strips(const DepthwiseWindows<T, S>& it) {
  constexpr int places = kStripPlaces<T, kTaps>, channels = kStripVectors<T, kTaps> * kLanesOf<T>;
  for (int64_t first = 0; first < it.places; first += places) {
    const int64_t begin = first * kStride + it.origin;
    const bool is_inner = begin >= 0 && first + places <= it.places &&
                          begin + (places - 1) * kStride + kTaps <= it.pixels;
    int64_t channel = 0;
    for (; channel + channels <= it.channels; channel += channels) {
      if (is_inner) {
        depthwise_strip<T, S, kTaps, kStride, Strip::kInner>(it, first, channel);
      } else {
        depthwise_strip<T, S, kTaps, kStride, Strip::kAtEdge>(it, first, channel);
      }
    }
    if (channel < it.channels) {
      depthwise_strip<T, S, kTaps, kStride, Strip::kInPart>(it, first, channel);
    }
  }
}

template <typename T, typename S>
void depthwise_windows(const DepthwiseWindows<T, S>& it) {
  if (it.stride == 2) {
    switch (it.taps) {
      case 3: return depthwise_strips<T, S, 3, 2>(it);
      case 5: return depthwise_strips<T, S, 5, 2>(it);
      default: return depthwise_strips<T, S, 7, 2>(it);
    }
  }
  switch (it.taps) {
    case 1: return depthwise_strips<T, S, 1, 1>(it);
    case 2: return depthwise_strips<T, S, 2, 1>(it);
    case 3: return depthwise_strips<T, S, 3, 1>(it);
    case 4: return depthwise_strips<T, S, 4, 1>(it);
    case 5: return depthwise_strips<T, S, 5, 1>(it);
    case 6: return depthwise_strips<T, S, 6, 1>(it);
    default: return depthwise_strips<T, S, 7, 1>(it);
  }
}

template <typename T, typename S>
constexpr DepthwiseKernels<T, S> kDepthwiseKernels = {depthwise_row<T, S>, depthwise_result<T, S>,
                                                      depthwise_windows<T, S>};

template <typename T>
struct TableMaker {
  Kernels<T> table;

  template <template <typename> class F, int kOperands>
  void word(Opcode op) {
    auto& row = table.elementwise[static_cast<size_t>(op)];
    if constexpr (kOperands == 1) {
      row[0] = unary<T, F<T>>;
    } else if constexpr (kOperands == 2) {
      row[0] = binary<T, F<T>, 0>;
      row[1] = binary<T, F<T>, 1>;
      row[2] = binary<T, F<T>, 2>;
    } else {
      row[0] = ternary<T, F<T>, 0>;
      row[1] = ternary<T, F<T>, 1>;
      row[2] = ternary<T, F<T>, 2>;
      row[3] = ternary<T, F<T>, 3>;
      row[4] = ternary<T, F<T>, 4>;
      row[5] = ternary<T, F<T>, 5>;
      row[6] = ternary<T, F<T>, 6>;
    }
  }
  template <typename Memory>
  void memory(ir::DType dtype) {
    table.load[static_cast<size_t>(dtype)] = load<T, Memory>;
    table.store[static_cast<size_t>(dtype)] = store<T, Memory>;
  }

  TableMaker() {
#define TORCH_ORT_WORD(name, operands, cost, zero, on_integers) \
  word<name, operands>(Opcode::k##name);
    TORCH_ORT_POINTWISE_WORDS(TORCH_ORT_WORD)
#undef TORCH_ORT_WORD
    const auto pair = [this](Opcode gradient) -> auto& {
      return table.with_gradient[static_cast<size_t>(gradient)];
    };
    pair(Opcode::kGeluGrad) = with_gradient<T, Gelu<T>, GeluGrad<T>>;
    pair(Opcode::kGeluTanhGrad) = with_gradient<T, GeluTanh<T>, GeluTanhGrad<T>>;
    pair(Opcode::kSiluGrad) = with_gradient<T, Silu<T>, SiluGrad<T>>;
    table.sum_rows = sum_rows<T>;
    table.max_rows = max_rows<T>;
    table.min_rows = min_rows<T>;
    table.add_rows = add_rows<T>;
    table.expand_rows = expand_rows<T>;
    table.exp_row = exp_row<T>;
    table.multiply = multiply<T>;
    table.multiply_scattered = multiply_scattered<T>;
    table.pack = pack<T>;
    table.transpose = transpose_rows<T>;
    table.panel_width = 2 * kLanesOf<T>;
    table.product_rows = kProductRows<T>;
    table.multiply_columns = multiply_columns<T>;
    table.multiply_stripes = multiply_stripes<T>;
    table.stripe_rows = kStripeRows;
    table.tiles = kTileTransforms<T>;
    table.peak = kPeak<T>;
    table.copy_past_caches = copy_past_caches;
    table.depthwise = kDepthwiseKernels<T, T>;
    if constexpr (std::is_same_v<T, float>) {
      table.depthwise_bfloat16 = kDepthwiseKernels<T, c10::BFloat16>;
      table.depthwise_half = kDepthwiseKernels<T, c10::Half>;
    }
    table.lstm = lstm<T>;
    table.lstm_grad = lstm_grad<T>;
    table.gru = gru<T>;
    table.gru_grad = gru_grad<T>;
    table.random_mask = random_mask<T>;
    table.sgd = sgd<T>;
    table.adam = adam<T>;
    table.lamb = lamb<T>;
    table.sum_squares = sum_squares<T>;
    memory<float>(ir::DType::kFloat);
    memory<double>(ir::DType::kDouble);
    memory<c10::BFloat16>(ir::DType::kBFloat16);
    memory<c10::Half>(ir::DType::kHalf);
    memory<bool>(ir::DType::kBool);
    memory<uint8_t>(ir::DType::kUInt8);
    memory<int8_t>(ir::DType::kInt8);
    memory<int16_t>(ir::DType::kInt16);
    memory<int32_t>(ir::DType::kInt32);
    memory<int64_t>(ir::DType::kInt64);
  }
};

}  // namespace
}  // namespace torch_ort::cpu
