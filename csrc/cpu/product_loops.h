// Products of packed matrices, with a tile of the result in registers. A part of kernels_loops.h;
// everything here has internal linkage for the reason given there.
#pragma once

#include "cpu/kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#elif defined(CPU_CAPABILITY_NEON)
#include <arm_neon.h>
#endif

namespace torch_ort::cpu {
namespace {

// A vector type of the compiler. ATen's portable vectors are arrays, which compilers keep in
// memory.
template <typename T>
struct Register {
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kBytes = 64;
#elif defined(CPU_CAPABILITY_AVX2)
  static constexpr int kBytes = 32;
#else
  static constexpr int kBytes = 16;
#endif
  using Type [[gnu::vector_size(kBytes)]] = T;
  static constexpr int kWidth = kBytes / sizeof(T);
};
template <typename T>
using Vector = typename Register<T>::Type;
template <typename T>
constexpr int kLanesOf = Register<T>::kWidth;

template <typename T>
inline Vector<T> load_vector(const T* from) {
  Vector<T> vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// The same for numbers of which each is used by itself. GCC would otherwise load one by one.
template <typename T>
inline Vector<T> load_lanes(const T* from) {
#if defined(CPU_CAPABILITY_NEON)
  if constexpr (std::is_same_v<T, float>) return vld1q_f32(from);
  if constexpr (std::is_same_v<T, double>) return vld1q_f64(from);
#endif
  return load_vector(from);
}

template <typename T>
inline void store_vector(T* to, const Vector<T>& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_NEON)
constexpr bool kHasManyRegisters = true;  // 32 for vectors, else 16
#else
constexpr bool kHasManyRegisters = false;
#endif
#if defined(CPU_CAPABILITY_NEON)
// Whether an instruction multiplies a vector by one lane of another. Then numbers of the left
// factor that stand side by side are loaded together. Elsewhere each is copied to all lanes as it
// is loaded.
constexpr bool kMultipliesByLane = true;
#else
constexpr bool kMultipliesByLane = false;
#endif

// How many sums to keep in registers. Factors need the others.
constexpr int kRegisterSums = kHasManyRegisters ? 24 : 12;

#if defined(CPU_CAPABILITY_AVX2)
// A mask of the first bytes of a vector, in lanes of four bytes.
inline __m256i mask_of_first(int64_t bytes) {
  alignas(64) static constexpr int32_t kLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kLanes + 8 - bytes / 4));
}
#endif

// Loads the first `count` numbers; the others are zero.
template <typename T>
inline Vector<T> load_part(const T* from, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1), from);
  } else {
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1U << count) - 1), from);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    return _mm256_maskload_ps(from, mask_of_first(4 * count));
  } else {
    return _mm256_maskload_pd(from, mask_of_first(8 * count));
  }
#else
  Vector<T> vector{};
#pragma GCC unroll 8
  for (int i = 0; i < kLanesOf<T>; ++i) {
    if (i < count) vector[i] = from[i];
  }
  return vector;
#endif
}

template <typename T>
inline void store_part(T* to, const Vector<T>& vector, int64_t count) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1U << count) - 1), vector);
  } else {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1U << count) - 1), vector);
  }
#elif defined(CPU_CAPABILITY_AVX2)
  // A store with a mask takes as long as a dozen others on processors of AMD.
  const auto all = reinterpret_cast<__m256i>(vector);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (bytes == 32) return store_vector(to, vector);
  char* at = reinterpret_cast<char*>(to);
  __m128i half = _mm256_castsi256_si128(all);
  if ((bytes & 16) != 0) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), half);
    half = _mm256_extracti128_si256(all, 1);
    at += 16;
  }
  if ((bytes & 8) != 0) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(at), half);
    half = _mm_unpackhi_epi64(half, half);
    at += 8;
  }
  if ((bytes & 4) != 0) {
    const int last = _mm_cvtsi128_si32(half);
    std::memcpy(at, &last, sizeof(last));
  }
#else
  // A subscript that the compiler does not know would keep the vector in memory.
#pragma GCC unroll 8
  for (int i = 0; i < kLanesOf<T>; ++i) {
    if (i < count) to[i] = vector[i];
  }
#endif
}

// The rows of a tile. Their sums, two vectors wide, are in registers.
template <typename T>
constexpr int kProductRows = kRegisterSums / 2;

// ---- packing

// The lanes with these numbers, of `a` and, after its last one, of `b`. GCC 11 has only the second
// way to say it.
template <int... kLane, typename V>
inline V pick_lanes(const V& a, const V& b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kLane...);
#else
  using Numbers = decltype(a < b);
  return __builtin_shuffle(a, b, Numbers{kLane...});
#endif
}

template <typename T, int kDistance, bool kUpper, int... kLane>
inline Vector<T> exchanged(const Vector<T>& a, const Vector<T>& b,
                           std::integer_sequence<int, kLane...> /*lanes*/) {
  constexpr int width = sizeof...(kLane);
  if constexpr (kUpper) {
    return pick_lanes<(kLane & kDistance ? width + kLane : kLane + kDistance)...>(a, b);
  } else {
    return pick_lanes<(kLane & kDistance ? width + kLane - kDistance : kLane)...>(a, b);
  }
}

// Transposes by exchanging blocks of 1, 2, 4... numbers across the diagonal.
template <typename T, int kDistance = 1>
inline void exchange_blocks(Vector<T>* rows) {
  constexpr int width = kLanesOf<T>;
  constexpr auto lanes = std::make_integer_sequence<int, width>();
  if constexpr (kDistance < width) {
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) {
      if ((i & kDistance) != 0) continue;
      const Vector<T> a = rows[i], b = rows[i + kDistance];
      rows[i] = exchanged<T, kDistance, false>(a, b, lanes);
      rows[i + kDistance] = exchanged<T, kDistance, true>(a, b, lanes);
    }
    exchange_blocks<T, 2 * kDistance>(rows);
  }
}

template <typename T>
inline void transpose(Vector<T>* rows) {
#if defined(CPU_CAPABILITY_AVX2)
  // Single numbers can only be exchanged by two instructions, but interleaved by one.
  if constexpr (std::is_same_v<T, float>) {
    Vector<T> pairs[8];  // of rows i and i + 1: lower halves of their lanes, and upper ones
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = pick_lanes<0, 8, 1, 9, 4, 12, 5, 13>(rows[i], rows[i + 1]);
      pairs[i + 1] = pick_lanes<2, 10, 3, 11, 6, 14, 7, 15>(rows[i], rows[i + 1]);
    }
    Vector<T> fours[8];  // of rows 0 to 3 and 4 to 7: columns i and i + 4
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        fours[i + 2 * j] = pick_lanes<0, 1, 8, 9, 4, 5, 12, 13>(pairs[i + j], pairs[i + j + 2]);
        fours[i + 2 * j + 1] =
            pick_lanes<2, 3, 10, 11, 6, 7, 14, 15>(pairs[i + j], pairs[i + j + 2]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rows[i] = pick_lanes<0, 1, 2, 3, 8, 9, 10, 11>(fours[i], fours[i + 4]);
      rows[i + 4] = pick_lanes<4, 5, 6, 7, 12, 13, 14, 15>(fours[i], fours[i + 4]);
    }
    return;
  }
#endif
  exchange_blocks<T>(rows);
}

// Transposes a block of at most as many rows and columns as a vector has numbers.
template <typename T, bool kWhole>
inline void transpose_block(const Transposition<T>& it, int64_t row, int64_t column) {
  constexpr int width = kLanesOf<T>;
  const int64_t rows = it.rows - row, columns = it.columns - column;
  const T* const from = it.from + row * it.from_row + column;
  T* const to = it.to + column * it.to_row + row;
  Vector<T> vectors[width];
#pragma GCC unroll 16
  for (int j = 0; j < width; ++j) {
    const T* const numbers = from + j * it.from_row;
    if constexpr (kWhole) {
      vectors[j] = load_vector(numbers);
    } else if (j >= rows) {
      vectors[j] = Vector<T>{};
    } else {
      vectors[j] = columns < width ? load_part(numbers, columns) : load_vector(numbers);
    }
  }
  transpose<T>(vectors);
#pragma GCC unroll 16
  for (int i = 0; i < width; ++i) {
    if constexpr (kWhole) {
      store_vector(to + i * it.to_row, vectors[i]);
    } else if (i < columns) {
      if (rows < width) {
        store_part(to + i * it.to_row, vectors[i], rows);
      } else {
        store_vector(to + i * it.to_row, vectors[i]);
      }
    }
  }
}

template <typename T>
void transpose_rows(const Transposition<T>& it) {
  constexpr int width = kLanesOf<T>;
  for (int64_t column = 0; column < it.columns; column += width) {
    const bool is_whole = column + width <= it.columns;
    for (int64_t row = 0; row < it.rows; row += width) {
      if (is_whole && row + width <= it.rows) {
        transpose_block<T, true>(it, row, column);
      } else {
        transpose_block<T, false>(it, row, column);
      }
    }
  }
}

// Packs the steps [begin, begin + steps) of a panel whose numbers are contiguous along the steps.
template <typename T, int kPanelWidth, bool kWhole>
inline void pack_along(const Packing<T>& it, int64_t begin, int64_t steps) {
  constexpr int width = kLanesOf<T>;
#pragma GCC unroll 8
  for (int first = 0; first < kPanelWidth; first += width) {
    constexpr auto least = [](int a, int b) { return a < b ? a : b; };
    const int wanted = least(width, kPanelWidth - first);
    Vector<T> rows[width];
#pragma GCC unroll 16
    for (int j = 0; j < width; ++j) {
      rows[j] = Vector<T>{};
      if (j >= wanted || (!kWhole && first + j >= it.count)) continue;
      const T* from = it.from + (first + j) * it.across + begin;
      rows[j] = steps == width ? load_vector(from) : load_part(from, steps);
    }
    transpose<T>(rows);
    T* to = it.to + begin * kPanelWidth + first;
    const auto store = [&](int64_t p) {
      std::memcpy(to + p * kPanelWidth, &rows[p], static_cast<size_t>(wanted) * sizeof(T));
    };
    if (steps < width) {
      for (int64_t p = 0; p < steps; ++p) store(p);
      continue;
    }
    // A step of a panel that is narrower than a vector is stored as a whole one, whose end the next
    // step overwrites. After the last step there may be no memory.
    const bool overlaps = first == 0 && wanted < width;
#pragma GCC unroll 16
    for (int p = 0; p < width - 1; ++p) {
      overlaps ? store_vector(to + p * kPanelWidth, rows[p]) : store(p);
    }
    if (overlaps && begin + steps < it.steps) {
      store_vector(to + (width - 1) * kPanelWidth, rows[width - 1]);
    } else {
      store(width - 1);
    }
  }
}

// Packs one panel.
template <typename T, int kPanelWidth>
void pack_panel(const Packing<T>& it) {
  constexpr int width = kLanesOf<T>;
  const bool is_whole = it.count == kPanelWidth;
  if (it.along == 1) {
    for (int64_t p = 0; p < it.steps; p += width) {
      const int64_t steps = std::min<int64_t>(width, it.steps - p);
      if (is_whole && steps == width) {
        pack_along<T, kPanelWidth, true>(it, p, width);
      } else {
        pack_along<T, kPanelWidth, false>(it, p, steps);
      }
    }
    return;
  }
  for (int64_t p = 0; p < it.steps; ++p) {
    const T* from = it.from + p * it.along;
    T* to = it.to + p * kPanelWidth;
    for (int64_t j = 0; j < it.count; ++j) to[j] = from[j * it.across];
    std::fill(to + it.count, to + kPanelWidth, T(0));
  }
}

// Packs panels whose numbers are contiguous across the steps: each step is read once, for all
// panels. Steps may be pages apart, which the processor does not foresee; so they are prefetched.
template <typename T, int kPanelWidth>
void pack_across(const Packing<T>& it) {
  constexpr int64_t early = 8, line = 64 / sizeof(T);
  constexpr int width = kLanesOf<T>;
  const int64_t whole = it.count / kPanelWidth, rest = it.count % kPanelWidth;
  const int64_t panel = it.steps * kPanelWidth;
  for (int64_t p = 0; p < it.steps; ++p) {
    const T* from = it.from + p * it.along;
    T* to = it.to + p * kPanelWidth;
    if (p + early < it.steps) {
      const T* next = from + early * it.along;
      for (int64_t j = 0; j < it.count; j += line) __builtin_prefetch(next + j);
      __builtin_prefetch(next + it.count - 1);
    }
    for (int64_t i = 0; i < whole; ++i, from += kPanelWidth, to += panel) {
      std::memcpy(to, from, kPanelWidth * sizeof(T));
    }
    if (rest == 0) continue;
    if constexpr (kPanelWidth % width == 0) {
#pragma GCC unroll 2
      for (int first = 0; first < kPanelWidth; first += width) {
        const int64_t count = std::min<int64_t>(rest - first, width);
        store_vector(to + first, count > 0 ? load_part(from + first, count) : Vector<T>{});
      }
    } else {
      std::copy(from, from + rest, to);
      std::fill(to + rest, to + kPanelWidth, T(0));
    }
  }
}

template <typename T, int kPanelWidth>
void pack_panels(const Packing<T>& it) {
  if (it.across == 1 && it.along != 1) return pack_across<T, kPanelWidth>(it);
  for (int64_t first = 0; first < it.count; first += kPanelWidth) {
    Packing<T> panel = it;
    panel.to += first * it.steps;
    panel.from += first * it.across;
    panel.count = std::min<int64_t>(it.count - first, kPanelWidth);
    pack_panel<T, kPanelWidth>(panel);
  }
}

template <typename T>
void pack(const Packing<T>& it) {
  constexpr int wide = 2 * kLanesOf<T>;
  if (it.width == wide) return pack_panels<T, wide>(it);
  if (it.width == wide / 2) return pack_panels<T, wide / 2>(it);
  return pack_panels<T, kProductRows<T>>(it);
}

// ---- products

// A step of the sums: adds a number of the left factor times a vector of the right one.
template <typename T>
struct Numbers {
  static constexpr bool kTakesLanes = kMultipliesByLane;
  static Vector<T> add_product(const Vector<T>& sums, const T* left, const Vector<T>& right) {
    return add_product(sums, *left, right);
  }
  static Vector<T> add_product(const Vector<T>& sums, T left, const Vector<T>& right) {
    // Subtracting a vector of zeros copies the number to all lanes. Compilers omit the subtraction,
    // which they could not do with an addition, since -0 + 0 is 0.
    return sums + (left - Vector<T>{}) * right;
  }
};

// From so many steps on, prefetching the memory of the result pays.
constexpr int64_t kLongSum = 64;

// Computes one tile of a PanelProduct. `kPackedRows` is the number of rows in a panel of the left
// factor, or 0 if that is not packed. `kFetches`: the next panel is fetched.
template <typename T, typename Step, int kVectors, int kRows, int kPackedRows, bool kFetches>
void multiply_tile(const PanelProduct<T>& it, int64_t row, int64_t panel) {
  constexpr int width = kLanesOf<T>;
  constexpr bool takes_lanes = Step::kTakesLanes && kPackedRows > 0;
  const int64_t a_row = kPackedRows > 0 ? 1 : it.a_row;
  const int64_t a_column = kPackedRows > 0 ? kPackedRows : it.a_column;
  const T* a = it.a + row * (kPackedRows > 0 ? it.k : it.a_row);
  const T* b = it.b + panel * it.b_panel;
  const int64_t first = panel * kVectors * width;
  T* c = it.c + row * it.c_row + first;
  const T* start = it.start == nullptr ? nullptr : it.start + row * it.start_row + first;
  const T* touched = start == nullptr ? c : start;
  const int64_t touched_row = start == nullptr ? it.c_row : it.start_row;
  if (it.k >= kLongSum) {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(touched + i * touched_row + v * width, 1);
      }
    }
  }
  Vector<T> sums[kRows][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Vector<T>{};
  }
  // The instructions of the loop itself are a sixth of a step of 12 multiplications. A core that
  // gives half of its turns to another thread starts them too slowly to keep its units busy.
#pragma GCC unroll 4
  for (int64_t p = 0; p < it.k; ++p) {
    Vector<T> right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load_vector(b + v * width);
    Vector<T> left{};
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      if (takes_lanes && i % width == 0) left = load_lanes(a + i);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (takes_lanes) {
          sums[i][v] = Step::add_product(sums[i][v], left[i % width], right[v]);
        } else {
          sums[i][v] = Step::add_product(sums[i][v], a + i * a_row, right[v]);
        }
      }
    }
    if constexpr (kFetches) {
      // The last number of each line, for panels need not begin where lines do.
      constexpr int line = std::min<int>(64 / sizeof(T), kVectors * width);
#pragma GCC unroll 2
      for (int last = line - 1; last < kVectors * width; last += line) {
        __builtin_prefetch(b + it.b_panel + last, 0, 2);
      }
    }
    a += a_column;
    b += it.b_row;
  }
  const int64_t columns = std::min<int64_t>(it.columns - first, kVectors * width);
  if (columns == kVectors * width) {
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (start != nullptr) sums[i][v] += load_vector(start + i * it.start_row + v * width);
        store_vector(c + i * it.c_row + v * width, sums[i][v]);
      }
    }
    return;
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t count = std::clamp<int64_t>(columns - v * width, 0, width);
      if (start != nullptr) sums[i][v] += load_part(start + i * it.start_row + v * width, count);
      store_part(c + i * it.c_row + v * width, sums[i][v], count);
    }
  }
}

template <typename T, typename Step, int kVectors, int kPackedRows, bool kFetches, int... kRows>
void multiply_rows(const PanelProduct<T>& it, int64_t row, int64_t panel,
                   std::integer_sequence<int, kRows...> /*rows*/) {
  using Tile = void (*)(const PanelProduct<T>&, int64_t, int64_t);
  static constexpr Tile kTiles[] = {
      multiply_tile<T, Step, kVectors, kRows + 1, kPackedRows, kFetches>...};
  kTiles[std::min<int64_t>(it.m - row, sizeof...(kRows)) - 1](it, row, panel);
}

template <typename T, typename Step, int kVectors, int kPackedRows>
void multiply_panels(const PanelProduct<T>& it) {
  constexpr int rows = kProductRows<T>;
  constexpr auto sizes = std::make_integer_sequence<int, rows>();
  for (int64_t panel = 0; panel < it.num_panels; ++panel) {
    int64_t row = 0;
    if (it.fetches_next && panel + 1 < it.num_panels) {
      multiply_rows<T, Step, kVectors, kPackedRows, true>(it, row, panel, sizes);
      row += rows;
    }
    for (; row < it.m; row += rows) {
      multiply_rows<T, Step, kVectors, kPackedRows, false>(it, row, panel, sizes);
    }
  }
}

template <typename T, typename Step = Numbers<T>>
void multiply(const PanelProduct<T>& it) {
  constexpr int rows = kProductRows<T>;
  const bool is_wide = it.width != kLanesOf<T>;
  if (it.a_is_packed) {
    return is_wide ? multiply_panels<T, Step, 2, rows>(it) : multiply_panels<T, Step, 1, rows>(it);
  }
  return is_wide ? multiply_panels<T, Step, 2, 0>(it) : multiply_panels<T, Step, 1, 0>(it);
}

// ---- products of rows that lie anywhere

// As many as have their addresses in registers.
template <typename T>
constexpr int kScatteredRows = kHasManyRegisters ? 8 : 6;

// Computes one tile of a ScatteredProduct.
template <typename T, int kVectors, int kRows>
void multiply_scattered_tile(const ScatteredProduct<T>& it, int64_t row, int64_t panel) {
  constexpr int width = kLanesOf<T>;
  const T* b = it.b + panel * it.b_panel;
  Vector<T> sums[kRows][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Vector<T>{};
  }
  for (int64_t s = 0; s < it.num_segments; ++s) {
    const T* a[kRows];
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) a[i] = it.a[s * it.a_segment + row + i];
#pragma GCC unroll 4
    for (int64_t p = 0; p < it.steps; ++p, b += kVectors * width) {
      Vector<T> right[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) right[v] = load_vector(b + v * width);
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[i][v] = Numbers<T>::add_product(sums[i][v], a[i] + p, right[v]);
        }
      }
    }
  }
  const int64_t first = panel * kVectors * width;
  const int64_t columns = std::min<int64_t>(it.columns - first, kVectors * width);
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    T* const c = it.c[row + i] + it.column + first;
    const T* start = it.adds ? c : it.start == nullptr ? nullptr : it.start + it.column + first;
    if (columns == kVectors * width) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        if (start != nullptr) sums[i][v] += load_vector(start + v * width);
        store_vector(c + v * width, sums[i][v]);
      }
      continue;
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t count = std::clamp<int64_t>(columns - v * width, 0, width);
      if (start != nullptr) sums[i][v] += load_part(start + v * width, count);
      store_part(c + v * width, sums[i][v], count);
    }
  }
}

template <typename T, int kVectors, int... kRows>
void multiply_scattered_panels(const ScatteredProduct<T>& it,
                               std::integer_sequence<int, kRows...> /*rows*/) {
  using Tile = void (*)(const ScatteredProduct<T>&, int64_t, int64_t);
  static constexpr Tile kTiles[] = {multiply_scattered_tile<T, kVectors, kRows + 1>...};
  constexpr int64_t rows = sizeof...(kRows);
  for (int64_t panel = 0; panel < it.num_panels; ++panel) {
    for (int64_t row = 0; row < it.m; row += rows) {
      kTiles[std::min(it.m - row, rows) - 1](it, row, panel);
    }
  }
}

template <typename T>
void multiply_scattered(const ScatteredProduct<T>& it) {
  constexpr auto sizes = std::make_integer_sequence<int, kScatteredRows<T>>();
  it.width != kLanesOf<T> ? multiply_scattered_panels<T, 2>(it, sizes)
                          : multiply_scattered_panels<T, 1>(it, sizes);
}

}  // namespace
}  // namespace torch_ort::cpu
