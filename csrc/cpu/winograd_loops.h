// The transforms of Winograd convolutions (cpu/winograd.cpp). A part of kernels_loops.h; everything
// here has internal linkage for the reason given there.
#pragma once

#include "cpu/kernels.h"
#include "cpu/product_loops.h"

namespace torch_ort::cpu {
namespace {

// Each transform is one of a vector, of these sizes, applied to the columns of a square and then to
// its rows. V is a number or a vector of numbers.

struct ImageTransform {  // the transpose of B
  static constexpr int kFrom = 4, kTo = 4;
  template <typename V>
  static void apply(const V* x, V* y) {
    y[0] = x[0] - x[2];
    y[1] = x[1] + x[2];
    y[2] = x[2] - x[1];
    y[3] = x[1] - x[3];
  }
};

struct GradientTransform {  // A
  static constexpr int kFrom = 2, kTo = 4;
  template <typename V>
  static void apply(const V* x, V* y) {
    y[0] = x[0];
    y[1] = x[0] + x[1];
    y[2] = x[0] - x[1];
    y[3] = -x[1];
  }
};

struct ResultTransform {  // the transpose of A
  static constexpr int kFrom = 4, kTo = 2;
  template <typename V>
  static void apply(const V* x, V* y) {
    y[0] = x[0] + x[1] + x[2];
    y[1] = x[1] - x[2] - x[3];
  }
};

struct WeightTransform {  // G
  static constexpr int kFrom = 3, kTo = 4;
  template <typename V>
  static void apply(const V* x, V* y) {
    const V half = (x[0] + x[2]) / 2, middle = x[1] / 2;
    y[0] = x[0];
    y[1] = half + middle;
    y[2] = half - middle;
    y[3] = x[2];
  }
};

struct WeightGradientTransform {  // the transpose of G
  static constexpr int kFrom = 4, kTo = 3;
  template <typename V>
  static void apply(const V* x, V* y) {
    const V half = (x[1] + x[2]) / 2;
    y[0] = x[0] + half;
    y[1] = (x[1] - x[2]) / 2;
    y[2] = half + x[3];
  }
};

template <typename Transform, typename V>
inline void transform_square(const V* from, V* to) {
  constexpr int n = Transform::kFrom, m = Transform::kTo;
  V half[m * n];
#pragma GCC unroll 4
  for (int column = 0; column < n; ++column) {
    V x[n], y[m];
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) x[i] = from[i * n + column];
    Transform::apply(x, y);
#pragma GCC unroll 4
    for (int i = 0; i < m; ++i) half[i * n + column] = y[i];
  }
#pragma GCC unroll 4
  for (int row = 0; row < m; ++row) Transform::apply(half + row * n, to + row * m);
}

// `kAdds`: one more row is added to each row of the result. `kChecks`: returns 0 if all numbers
// that it computes are finite, and NaN otherwise.
template <typename T, typename Transform, bool kAdds, bool kChecks>
inline T transform_rows(const T* const* from, T* const* to, int64_t n) {
  constexpr int num_from = Transform::kFrom * Transform::kFrom;
  constexpr int num_to = Transform::kTo * Transform::kTo;
  const auto transform = [&](const auto& load, const auto& store, auto& zeros) {
    using V = std::remove_reference_t<decltype(zeros)>;
    V x[num_from], y[num_to];
#pragma GCC unroll 16
    for (int i = 0; i < num_from; ++i) x[i] = load(from[i]);
    transform_square<Transform>(x, y);
#pragma GCC unroll 16
    for (int i = 0; i < num_to; ++i) {
      if constexpr (kAdds) y[i] = y[i] + load(from[num_from]);
      if constexpr (kChecks) zeros = zeros + y[i] * T(0);
      store(to[i], y[i]);
    }
  };
  constexpr int64_t width = kLanesOf<T>;
  Vector<T> zeros{};
  T zero = 0;
  int64_t j = 0;
  for (; j + width <= n; j += width) {
    transform([&](const T* row) { return load_vector(row + j); },
              [&](T* row, const Vector<T>& value) { store_vector(row + j, value); }, zeros);
  }
  for (; j < n; ++j) {
    transform([&](const T* row) { return row[j]; }, [&](T* row, T value) { row[j] = value; }, zero);
  }
  for (int64_t lane = 0; lane < width; ++lane) zero += zeros[lane];
  return zero;
}

template <typename T, typename Transform>
void transform_tile(const T* const* from, T* const* to, int64_t n) {
  transform_rows<T, Transform, false, false>(from, to, n);
}

template <typename T, typename Transform, bool kAdds>
T transform_to_result(const T* const* from, T* const* to, int64_t n) {
  return transform_rows<T, Transform, kAdds, true>(from, to, n);
}

template <typename T>
constexpr TileTransforms<T> kTileTransforms = {
    .image = transform_tile<T, ImageTransform>,
    .gradient = transform_tile<T, GradientTransform>,
    .weight = transform_tile<T, WeightTransform>,
    .result = transform_to_result<T, ResultTransform, true>,
    .weight_gradient = transform_to_result<T, WeightGradientTransform, false>,
};

}  // namespace
}  // namespace torch_ort::cpu
