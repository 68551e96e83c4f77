// Products of bfloat16, built for processors whose AVX-512 multiplies such numbers.
#include "cpu/product_loops.h"

#include <immintrin.h>

namespace torch_ort::cpu {

namespace {

// Each step adds two products to each sum. A pair of bfloat16 is read as one float32; it moves as
// an integer, since its bits need not be a valid number.
struct Pairs {
  static constexpr bool kTakesLanes = false;
  static Vector<float> add_product(const Vector<float>& sums, const float* left,
                                   const Vector<float>& right) {
    int32_t pair = 0;
    std::memcpy(&pair, left, sizeof(pair));
    return _mm512_dpbf16_ps(sums, (__m512bh)right, (__m512bh)_mm512_set1_epi32(pair));
  }
};

uint32_t pair_of(uint16_t first, uint16_t second) {
  return static_cast<uint32_t>(first) | static_cast<uint32_t>(second) << 16;
}

template <int kPanelWidth>
void pack_rows(const PairPacking& it) {
  for (int64_t i = 0; i < it.numbers; i += 2) {
    const uint16_t* from = it.from + i * it.along;
    const int64_t next = i + 1 < it.numbers ? it.along : -1;
    uint32_t pairs[kPanelWidth] = {};
    if (next >= 0 && it.across == 1 && it.count == kPanelWidth) {
      for (int j = 0; j < kPanelWidth; ++j) pairs[j] = pair_of(from[j], from[next + j]);
    } else {
      for (int64_t j = 0; j < it.count; ++j) {
        const uint16_t* number = from + j * it.across;
        pairs[j] = pair_of(*number, next >= 0 ? number[next] : uint16_t{0});
      }
    }
    std::memcpy(it.to + i / 2 * kPanelWidth, pairs, sizeof(pairs));
  }
}

void pack_pairs(const PairPacking& it) {
  constexpr int wide = 2 * kLanesOf<float>;
  PairPacking rest = it;
  if (it.along == 1 && it.across % 2 == 0) {
    // Pairs are contiguous in memory, as they are in the packed panels.
    const int64_t done = it.numbers / 2;
    pack<float>({.to = it.to,
                 .width = it.width,
                 .steps = done,
                 .from = reinterpret_cast<const float*>(it.from),
                 .across = it.across / 2,
                 .along = 1,
                 .count = it.count});
    rest.to += done * it.width;
    rest.from += 2 * done;
    rest.numbers -= 2 * done;
  }
  if (it.width == wide) return pack_rows<wide>(rest);
  if (it.width == wide / 2) return pack_rows<wide / 2>(rest);
  return pack_rows<kProductRows<float>>(rest);
}

// Adds 1 * 1 and -1 * 1 to each number, so that sums do not grow.
double multiply_and_add(int64_t rounds) {
  const auto ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
  const auto signs = (__m512bh)_mm512_set1_epi32(static_cast<int>(0xBF803F80));
  __m512 sums[kRegisterSums];
#pragma GCC unroll 24
  for (int i = 0; i < kRegisterSums; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (; rounds > 0; --rounds) {
#pragma GCC unroll 24
    for (int i = 0; i < kRegisterSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], ones, signs);
  }
  float total = 0;
  for (const __m512& each : sums) total += _mm512_reduce_add_ps(each);
  return total;
}

}  // namespace

const PairKernels& pair_kernels_avx512() {
  static constexpr PairKernels kernels = {
      .multiply = multiply<float, Pairs>,
      .pack = pack_pairs,
      .peak = {multiply_and_add, 4 * kRegisterSums * kLanesOf<float>}};
  return kernels;
}

}  // namespace torch_ort::cpu
