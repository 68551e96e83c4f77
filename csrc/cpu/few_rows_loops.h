// Products of few rows, which read each number of the right factor once, from where it stands. A
// part of kernels_loops.h; everything here has internal linkage for the reason given there.
//
// Such a product takes as long as the memory needs to bring the right factor. Both loops therefore
// read long runs of memory, which the processor prefetches, and no tiles.
#pragma once

#include "cpu/product_loops.h"

namespace torch_ort::cpu {
namespace {

// Calls `body` for groups of kMost rows and for the rows that remain, with the number of rows as
// its template argument and the first one as its argument.
template <int kMost, typename F>
inline void for_groups_of_rows(int64_t m, const F& body) {
  for (int64_t row = 0; row < m; row += kMost) {
    const int64_t rows = std::min<int64_t>(m - row, kMost);
    [&]<int... kLess>(std::integer_sequence<int, kLess...> /*sizes*/) {
      ((rows == kLess + 1 ? body.template operator()<kLess + 1>(row) : void()), ...);
    }(std::make_integer_sequence<int, kMost>());
  }
}

template <typename T, int kDistance, int... kLane>
inline T sum_of_lanes(const Vector<T>& vector, std::integer_sequence<int, kLane...> lanes) {
  const Vector<T> sums = vector + pick_lanes<(kLane ^ kDistance)...>(vector, vector);
  if constexpr (kDistance == 1) {
    return sums[0];
  } else {
    return sum_of_lanes<T, kDistance / 2>(sums, lanes);
  }
}

template <typename T>
inline T sum_of_lanes(const Vector<T>& vector) {
  constexpr int width = kLanesOf<T>;
  return sum_of_lanes<T, width / 2>(vector, std::make_integer_sequence<int, width>());
}

// The sum of kCount vectors, in pairs. Loops over the pairs would keep the vectors in memory.
template <typename T, int kCount>
inline Vector<T> sum_of(const Vector<T>* vectors) {
  if constexpr (kCount == 1) {
    return vectors[0];
  } else {
    return sum_of<T, kCount / 2>(vectors) + sum_of<T, kCount / 2>(vectors + kCount / 2);
  }
}

// The products of kRows rows, from `row` on, with one column. There are about as many independent
// sums as the multiplying units need to be busy.
template <typename T, int kRows>
inline void multiply_column(const FewRows<T>& it, int64_t row, int64_t column) {
  constexpr int width = kLanesOf<T>, chains = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  const T* a = it.a + row * it.a_row;
  const T* b = it.b + column * it.b_stride;
  Vector<T> sums[kRows][chains];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int chain = 0; chain < chains; ++chain) sums[i][chain] = Vector<T>{};
  }
  int64_t p = 0;
  for (; p + chains * width <= it.k; p += chains * width) {
#pragma GCC unroll 8
    for (int chain = 0; chain < chains; ++chain) {
      const int64_t at = p + chain * width;
      const Vector<T> right = load_vector(b + at);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        sums[i][chain] += load_vector(a + i * it.a_row + at) * right;
      }
    }
  }
  for (; p < it.k; p += width) {
    const int64_t count = std::min<int64_t>(width, it.k - p);
    const Vector<T> right = count == width ? load_vector(b + p) : load_part(b + p, count);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const T* left = a + i * it.a_row + p;
      sums[i][0] += (count == width ? load_vector(left) : load_part(left, count)) * right;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    T sum = sum_of_lanes<T>(sum_of<T, chains>(sums[i]));
    if (it.start != nullptr) sum += it.start[(row + i) * it.start_row + column];
    it.c[(row + i) * it.c_row + column] = sum;
  }
}

// The columns of the right factor are contiguous.
template <typename T>
void multiply_columns(const FewRows<T>& it) {
  for (int64_t column = 0; column < it.n; ++column) {
    for_groups_of_rows<4>(
        it.m, [&]<int kRows>(int64_t row) { multiply_column<T, kRows>(it, row, column); });
  }
}

// How many numbers of the left factor stay in registers, of which there are 32 or 16. For each
// vector of sums that is read and written there should be four terms.
constexpr int kSplats = kHasManyRegisters ? 16 : 8;
constexpr int kStripeRows = kSplats / 4;

// Adds to kRows rows of the result what kTerms terms of the sums give for some columns.
template <typename T, int kRows, int kTerms>
inline void add_terms(const FewRows<T>& it, int64_t row, int64_t term, int64_t begin, int64_t end) {
  constexpr int width = kLanesOf<T>;
  Vector<T> left[kRows][kTerms];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int p = 0; p < kTerms; ++p) {
      left[i][p] = it.a[(row + i) * it.a_row + term + p] - Vector<T>{};
    }
  }
  const T* b = it.b + term * it.b_stride;
  T* c = it.c + row * it.c_row;
  for (int64_t j = begin; j < end; j += width) {
    const int64_t count = std::min<int64_t>(width, end - j);
    const bool is_whole = count == width;
    Vector<T> sums[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const T* from = c + i * it.c_row + j;
      sums[i] = is_whole ? load_vector(from) : load_part(from, count);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kTerms; ++p) {
      const T* from = b + p * it.b_stride + j;
      const Vector<T> right = is_whole ? load_vector(from) : load_part(from, count);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sums[i] += left[i][p] * right;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      T* to = c + i * it.c_row + j;
      is_whole ? store_vector(to, sums[i]) : store_part(to, sums[i], count);
    }
  }
}

template <typename T, int kRows>
inline void add_all_terms(const FewRows<T>& it, int64_t row, int64_t begin, int64_t end) {
  constexpr int terms = std::min(8, kSplats / kRows);
  int64_t term = 0;
  for (; term + terms <= it.k; term += terms) add_terms<T, kRows, terms>(it, row, term, begin, end);
  for (; term < it.k; ++term) add_terms<T, kRows, 1>(it, row, term, begin, end);
}

// The rows of the right factor are contiguous. A stripe of the result stays in the first-level
// cache while all terms are added to it.
template <typename T>
void multiply_stripes(const FewRows<T>& it) {
  constexpr int64_t bytes = 8192;
  const int64_t stripe = bytes / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(it.m, 1) /
                         kLanesOf<T> * kLanesOf<T>;
  for (int64_t begin = 0; begin < it.n; begin += stripe) {
    const int64_t end = std::min(it.n, begin + stripe);
    for (int64_t i = 0; i < it.m; ++i) {
      T* c = it.c + i * it.c_row;
      if (it.start == nullptr) {
        std::fill(c + begin, c + end, T(0));
      } else if (const T* start = it.start + i * it.start_row; start != c) {
        std::copy(start + begin, start + end, c + begin);
      }
    }
    for_groups_of_rows<kStripeRows>(
        it.m, [&]<int kRows>(int64_t row) { add_all_terms<T, kRows>(it, row, begin, end); });
  }
}

}  // namespace
}  // namespace torch_ort::cpu
