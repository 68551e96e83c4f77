// Products of bfloat16, built for processors whose NEON multiplies small matrices of such numbers
// (BFMMLA): two rows of four numbers times two columns of four are four sums, in one vector.
//
// A step therefore takes four terms of each sum, and a packed panel has for each step four numbers
// of each of its rows or columns, one after the other.
#include "cpu/product_loops.h"

#include <arm_neon.h>

namespace torch_ort::cpu {

namespace {

constexpr int kTerms = 4;  // of a step
constexpr int kRowPairs = kProductRows<float> / 2;

using Sums = float32x4_t;  // of two rows and two columns, row by row

bfloat16x8_t load_quads(const float* pairs) {
  return vld1q_bf16(reinterpret_cast<const bfloat16_t*>(pairs));
}
bfloat16x8_t load_quads(const float* first, const float* second) {
  return vcombine_bf16(vld1_bf16(reinterpret_cast<const bfloat16_t*>(first)),
                       vld1_bf16(reinterpret_cast<const bfloat16_t*>(second)));
}

void store_row(const PanelProduct<float>& it, int64_t row, int64_t column, float32x4_t sums) {
  const int64_t count = std::min<int64_t>(it.columns - column, kLanesOf<float>);
  if (count <= 0) return;
  auto numbers = (Vector<float>)sums;
  if (it.start != nullptr) numbers += load_part(it.start + row * it.start_row + column, count);
  float* to = it.c + row * it.c_row + column;
  count == kLanesOf<float> ? store_vector(to, numbers) : store_part(to, numbers, count);
}

// Two vectors of sums are two rows of four columns.
float32x4_t row_of(const Sums& left, const Sums& right, int row) {
  return row == 0 ? vcombine_f32(vget_low_f32(left), vget_low_f32(right))
                  : vcombine_f32(vget_high_f32(left), vget_high_f32(right));
}

// Computes one tile of a PanelProduct, of kPairs pairs of rows and kColumnPairs pairs of columns.
template <int kColumnPairs, bool kIsPacked, int kPairs>
void multiply_tile(const PanelProduct<float>& it, int64_t row, int64_t panel) {
  const int64_t rows = std::min<int64_t>(it.m - row, 2 * kPairs);
  const float* a = it.a + row * (kIsPacked ? it.k : it.a_row);
  // A last pair of one row has it twice.
  const int64_t last_row = rows == 2 * kPairs ? it.a_row : 0;
  const float* b = it.b + panel * it.b_panel;
  Sums sums[kPairs][kColumnPairs];
#pragma GCC unroll 6
  for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumnPairs; ++j) sums[i][j] = vdupq_n_f32(0);
  }
  for (int64_t p = 0; p < it.k; p += 2) {
    bfloat16x8_t right[kColumnPairs];
#pragma GCC unroll 4
    for (int j = 0; j < kColumnPairs; ++j) {
      right[j] = load_quads(b + j * kTerms);
    }
#pragma GCC unroll 6
    for (int i = 0; i < kPairs; ++i) {
      const float* first = a + 2 * i * it.a_row;
      const bfloat16x8_t left =
          kIsPacked ? load_quads(a + i * kTerms)
                    : load_quads(first, first + (i + 1 < kPairs ? it.a_row : last_row));
#pragma GCC unroll 4
      for (int j = 0; j < kColumnPairs; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], left, right[j]);
    }
    a += kIsPacked ? 2 * kProductRows<float> : 2;
    b += 2 * it.b_row;
  }
  const int64_t first = panel * 2 * kColumnPairs;
#pragma GCC unroll 6
  for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      if (2 * i + r >= rows) continue;
#pragma GCC unroll 2
      for (int j = 0; j < kColumnPairs; j += 2) {
        store_row(it, row + 2 * i + r, first + 2 * j, row_of(sums[i][j], sums[i][j + 1], r));
      }
    }
  }
}

template <int kColumnPairs, bool kIsPacked>
void multiply_all(const PanelProduct<float>& it) {
  const auto multiply = [&]<int... kLess>(int64_t row, int64_t panel,
                                          std::integer_sequence<int, kLess...> /*sizes*/) {
    using Tile = void (*)(const PanelProduct<float>&, int64_t, int64_t);
    static constexpr Tile kTiles[] = {multiply_tile<kColumnPairs, kIsPacked, kLess + 1>...};
    const int64_t pairs = std::min<int64_t>((it.m - row + 1) / 2, kRowPairs);
    kTiles[pairs - 1](it, row, panel);
  };
  for (int64_t panel = 0; panel < it.num_panels; ++panel) {
    for (int64_t row = 0; row < it.m; row += 2 * kRowPairs) {
      multiply(row, panel, std::make_integer_sequence<int, kRowPairs>());
    }
  }
}

void multiply_quads(const PanelProduct<float>& it) {
  constexpr int wide = kLanesOf<float>;  // pairs of columns in a whole panel
  if (it.width == 2 * wide) {
    return it.a_is_packed ? multiply_all<wide, true>(it) : multiply_all<wide, false>(it);
  }
  it.a_is_packed ? multiply_all<wide / 2, true>(it) : multiply_all<wide / 2, false>(it);
}

void pack_quads(const PairPacking& it) {
  float* to = it.to;
  for (int64_t p = 0; p < it.numbers; p += kTerms, to += 2 * it.width) {
    const int64_t terms = std::min<int64_t>(kTerms, it.numbers - p);
    const uint16_t* from = it.from + p * it.along;
    for (int64_t j = 0; j < it.width; ++j) {
      uint16_t numbers[kTerms] = {};
      if (j < it.count && terms == kTerms && it.along == 1) {
        std::memcpy(numbers, from + j * it.across, sizeof(numbers));
      } else if (j < it.count) {
        for (int64_t i = 0; i < terms; ++i) numbers[i] = from[j * it.across + i * it.along];
      }
      std::memcpy(to + 2 * j, numbers, sizeof(numbers));
    }
  }
}

// A pair of numbers in all lanes. The compiler does not see which: GCC 12 would write those of
// bfloat16 that it knows as if they were float16.
bfloat16x8_t pairs_of(uint32_t bits) {
  asm("" : "+r"(bits));
  return vreinterpretq_bf16_u32(vdupq_n_u32(bits));
}

// Adds 1 - 1 + 1 - 1 to each number, so that sums do not grow.
double multiply_and_add(int64_t rounds) {
  const bfloat16x8_t ones = pairs_of(0x3F803F80), signs = pairs_of(0xBF803F80);
  Sums sums[kRegisterSums];
#pragma GCC unroll 24
  for (int i = 0; i < kRegisterSums; ++i) sums[i] = vdupq_n_f32(static_cast<float>(i));
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 24
    for (int i = 0; i < kRegisterSums; ++i) sums[i] = vbfmmlaq_f32(sums[i], ones, signs);
  }
  float total = 0;
  for (const Sums& each : sums) total += vaddvq_f32(each);
  return total;
}

}  // namespace

const PairKernels& pair_kernels_neon() {
  static constexpr PairKernels kernels = {
      .multiply = multiply_quads,
      .pack = pack_quads,
      .pairs_at_once = kTerms / 2,
      .peak = {multiply_and_add, 2 * kTerms * kRegisterSums * kLanesOf<float>}};
  return kernels;
}

}  // namespace torch_ort::cpu
