// The kernels of which tile programs consist: loops over contiguous numbers. They are compiled once
// for each instruction set (kernels_<isa>.cpp); the process chooses one when it first needs a
// kernel.
#pragma once

#include "ir/type.h"
#include "ops/fusion.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace torch_ort::cpu {

// The opcodes are the point-wise words. Truth values are the numbers 0 and 1.
using Opcode = ops::Pointwise;
constexpr size_t kNumOpcodes = static_cast<size_t>(Opcode::kCount);

// A variant of a kernel is chosen by which operands are a single number, as bits: 1 for the first,
// 2 for the second, 4 for the third.
constexpr size_t kNumVariants = 8;
constexpr size_t kNumDTypes = 17;  // as many as ir::DType has

// The product c <- start + a * b. `a` is m x k: its element (i, p) is a[i * a_row + p * a_column],
// or it is packed in panels of Kernels::product_rows rows. `b` has panels of `width` columns and k
// rows; panels are b_panel apart and their rows b_row. `c` has m rows of `columns` numbers, of
// which the last panel may have fewer than `width`. `width` is Kernels::panel_width or half of it.
// `fetches_next`: each panel is brought to the second-level cache while the one before is used.
template <typename T>
struct PanelProduct {
  T* c;
  int64_t c_row;
  // Rows like those of c, and may be c itself; nullptr: zeros.
  const T* start = nullptr;
  int64_t start_row = 0;
  const T* a;
  int64_t a_row = 0, a_column = 0;
  bool a_is_packed = false;
  const T* b;
  int64_t b_row, b_panel, width, num_panels, columns, m, k;
  bool fetches_next = false;
};

// The product c <- start + a * b where rows of a and c lie anywhere. Row i of `a` has `steps`
// numbers of each segment s, from a[s * a_segment + i] on, and row i of `c` begins at c[i]. `b` is
// packed in panels of `width` columns with all steps of all segments; panels are b_panel apart.
// `m`, `width` and `columns` are as in PanelProduct.
template <typename T>
struct ScatteredProduct {
  T* const* c;
  bool adds = false;         // to what is in c
  const T* start = nullptr;  // if not, one row to begin all with; nullptr: zeros
  const T* const* a;
  int64_t a_segment, num_segments, steps;
  const T* b;
  int64_t b_panel, width, num_panels, columns, m;
  int64_t column = 0;  // of c and of the start, at which the columns begin
};

// The product c <- start + a * b for few rows. `a` is m x k with contiguous rows. Of `b` either the
// columns are contiguous, and b_stride apart, or the rows are.
template <typename T>
struct FewRows {
  T* c;
  int64_t c_row;
  // Rows like those of c, and may be c itself; nullptr: zeros.
  const T* start = nullptr;
  int64_t start_row = 0;
  const T* a;
  int64_t a_row;
  const T* b;
  int64_t b_stride;
  int64_t m, n, k;
};

// Packs panels of a factor, one after the other: for each of `steps` steps of the sum, a panel has
// `width` contiguous numbers. Number j of step p of the factor is from[j * across + p * along]; a
// panel that `count` does not fill up ends with zeros. `width` is Kernels::product_rows,
// Kernels::panel_width or half of the latter.
template <typename T>
struct Packing {
  T* to;
  int64_t width, steps;
  const T* from;
  int64_t across, along, count;
};

// Writes rows as columns: number i of row j of `from` becomes number j of row i of `to`. Rows are
// `to_row` and `from_row` numbers apart. The memory must not overlap.
template <typename T>
struct Transposition {
  T* to;
  int64_t to_row;
  const T* from;
  int64_t from_row;
  int64_t rows, columns;  // of `from`
};

// As Packing, for one panel of pairs of bfloat16 numbers, given as their bits: step p has the
// numbers 2 * p and 2 * p + 1 of `numbers`. Zeros fill up the last pair, and the last
// PairKernels::pairs_at_once pairs, whose order in the panel is that of the kernels.
struct PairPacking {
  float* to;
  int64_t width, numbers;
  const uint16_t* from;
  int64_t across, along, count;
};

// What one row of places adds to the taps of a convolution of each channel by itself, for
// kDepthwiseChannels channels c. The gradient's numbers are S in memory.
//   sums[t][c] += sum over places p of gradient[p][c] * image[p * image_step + t * tap_step][c]
constexpr int64_t kDepthwiseChannels = 16;
template <typename T, typename S = T>
struct DepthwiseRow {
  T* sums;
  int64_t taps;
  const S* gradient;
  int64_t gradient_step;  // from place to place, in elements
  const T* image;
  int64_t image_step, tap_step;
  int64_t places;
};

// Places p of a row of the result of such a convolution, for channels c in blocks b of
// kDepthwiseChannels. The numbers of image and result are S in memory:
//   result[p][c] = bias[b][c] + sum over taps t of
//                  taps[t].image[p * place_step][c] * taps[t].weights[b][c]
template <typename T, typename S = T>
struct DepthwiseTap {
  const S* image;
  const T* weights;
};
template <typename T, typename S = T>
struct DepthwiseResult {
  S* result;
  int64_t result_step;  // from place to place, in elements
  int64_t places, channels;
  const DepthwiseTap<T, S>* taps;
  int64_t num_taps;
  int64_t place_step;  // of the image
  const T* bias;
  int64_t block_step;  // of weights and bias, from block to block
};

// The same where the taps of a row reach pixels side by side, as they do without dilation, so that
// a pixel is read once for all of them:
//   result[p][c] = bias[b][c] + sum over rows r and taps t of
//                  rows[r].image[(p * stride + t + origin) * pixel_step][c] *
//                  rows[r].weights[t * tap_step][b][c]
// for the pixels from 0 to `pixels` alone.
template <typename T, typename S = T>
struct DepthwiseWindows {
  S* result;
  int64_t result_step;  // from place to place, in elements
  int64_t places, channels;
  const DepthwiseTap<T, S>* rows;
  int64_t num_rows;
  int64_t taps, stride, origin;
  int64_t pixels, pixel_step;
  int64_t tap_step;
  const T* bias;
  int64_t block_step;
};
constexpr bool has_depthwise_windows(int64_t taps, int64_t stride) {
  if (stride == 2) return taps == 3 || taps == 5 || taps == 7;
  return stride == 1 && taps >= 1 && taps <= 7;
}
template <typename T, typename S = T>
struct DepthwiseKernels {
  void (*row)(const DepthwiseRow<T, S>& row) = nullptr;
  void (*result)(const DepthwiseResult<T, S>& places) = nullptr;
  void (*windows)(const DepthwiseWindows<T, S>& places) = nullptr;  // has_depthwise_windows()
};

// The transforms of Winograd convolutions (cpu/winograd.cpp), of a tile of rows with n numbers.
template <typename T>
struct TileTransforms {
  using Transform = void (*)(const T* const* from, T* const* to, int64_t n);
  Transform image = nullptr;     // 4x4 pixels -> 4x4 rows
  Transform gradient = nullptr;  // 2x2 pixels -> 4x4 rows
  Transform weight = nullptr;    // 3x3 taps -> 4x4 rows
  // Return 0 if all numbers of the result are finite, and NaN otherwise.
  using Checked = T (*)(const T* const* from, T* const* to, int64_t n);
  Checked result = nullptr;           // 4x4 rows, and one to add to all -> 2x2 pixels
  Checked weight_gradient = nullptr;  // 4x4 rows -> 3x3 taps
};

// One time of a row of a batch in a recurrent layer, of which cpu/recurrent.h has the formulas, for
// the n numbers of its state. The gates are given as sums, x + W h, and are kept for backward.
template <typename T>
struct LstmRow {
  T *input, *forget, *fresh, *output;  // i, f, g, o
  const T* memory;                     // c before; may be `new_memory`
  T* new_memory;
  T* state;
  int64_t n;
};
template <typename T>
struct GruRow {
  T *reset, *update;    // r, z
  const T* hidden;      // m
  const T* fresh_part;  // x of n
  T* fresh;             // n
  const T* state;       // h before
  T* new_state;
  int64_t n;
};
// Their gradients, from the kept gates. Those of the state after this time and, of an LSTM, of the
// memory are given as `of_state` and `of_memory`, which become those before it, but for what goes
// through W h of the gates.
template <typename T>
struct LstmRowGrad {
  const T *input, *forget, *fresh, *output;
  const T *memory, *new_memory;
  const T* of_result;  // added to `of_state`; nullptr: zeros
  const T* of_state;
  T* of_memory;
  T *of_input, *of_forget, *of_fresh, *of_output;
  int64_t n;
};
template <typename T>
struct GruRowGrad {
  const T *reset, *update, *fresh, *hidden;
  const T* state;      // before
  const T* of_result;  // as above
  T* of_state;
  T *of_reset, *of_update, *of_fresh;                 // of x
  T *of_hidden_reset, *of_hidden_update, *of_hidden;  // of W h
  int64_t n;
};

// A loop of multiplications and additions on registers alone, with so many independent sums that
// only the processor's multiplying units limit it. No product of matrices can be faster.
struct RegisterLoop {
  double (*run)(int64_t rounds) = nullptr;  // returns the sum of all sums
  int64_t operations = 0;                   // multiplications and additions in a round
};

// What one step of an optimizer does to a parameter p with its gradient g, the running mean m of
// the gradient, and the running mean v of its square. SGD is that of torch.optim.
struct SgdRule {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  // The first step, in which the gradient becomes the momentum buffer.
  bool is_first = false;
};
// g <- gradient_factor g + weight_decay p;  m <- beta1 m + (1 - beta1) g;
// v <- beta2 v + (1 - beta2) g^2;  p <- keep p - step_size m / (sqrt(v) inverse_correction + eps)
struct AdamRule {
  double step_size = 0, inverse_correction = 1;
  double beta1 = 0, beta2 = 0, eps = 0;
  double weight_decay = 0, keep = 1;
  // Undoes the loss scale and clips; negative: it maximizes.
  double gradient_factor = 1;
};
// LAMB (You et al., "Large batch optimization for deep learning", 2020). m and v as above, then
//   r = mean_correction m / (sqrt(v) inverse_correction + eps) + weight_decay p
//   p <- p - lr |p| / |r| r
// where the ratio of the norms is clamped to its limits, and is 1 if one of them is 0.
struct LambRule {
  double lr = 0, mean_correction = 1, inverse_correction = 1;
  double beta1 = 0, beta2 = 0, eps = 0;
  double weight_decay = 0;
  double ratio_min = 0, ratio_max = 0;
  double gradient_factor = 1;
};

// Which numbers of a tensor to load or store: `count` runs of `n` numbers, `distance` apart;
// strides are in elements. The buffer of the program holds them contiguously.
struct Runs {
  int64_t n, stride = 1;
  int64_t count = 1, distance = 0;
};

// The kernels of one instruction set. Each processes `n` numbers. Its result `d` may be one of its
// operands, but must not overlap one otherwise.
template <typename T>
struct Kernels {
  using Elementwise = void (*)(T* d, const T* a, const T* b, const T* c, int64_t n);
  using Load = void (*)(T* d, const void* source, const Runs& runs);
  using Store = void (*)(void* target, const T* a, const Runs& runs);

  // By opcode and variant; nullptr if the word has no such variant.
  std::array<std::array<Elementwise, kNumVariants>, kNumOpcodes> elementwise{};
  // By the opcode of a gradient: `gradient` as its word gives it for a and b, and `d` as
  // word_of_gradient() gives it for b. Most of the work is the same.
  using WithGradient = void (*)(T* d, T* gradient, const T* a, const T* b, int64_t n);
  std::array<WithGradient, kNumOpcodes> with_gradient{};
  // `a` has contiguous rows of n numbers.
  using Rows = void (*)(T* d, const T* a, int64_t rows, int64_t n);
  Rows sum_rows = nullptr;  // d[r] += sum of row r
  Rows max_rows = nullptr;  // d[r] = max of d[r] and row r; NaN if there is one
  Rows min_rows = nullptr;
  Rows add_rows = nullptr;  // d += each row
  // d = exp(a - shift), with an error of at most two units in the last place. Returns the sum.
  T (*exp_row)(T* d, const T* a, T shift, int64_t n) = nullptr;
  void (*multiply)(const PanelProduct<T>& product) = nullptr;
  void (*multiply_scattered)(const ScatteredProduct<T>& product) = nullptr;
  void (*pack)(const Packing<T>& packing) = nullptr;
  void (*transpose)(const Transposition<T>& rows) = nullptr;
  int64_t panel_width = 0, product_rows = 0;
  void (*multiply_columns)(const FewRows<T>& product) = nullptr;  // columns of b are contiguous
  void (*multiply_stripes)(const FewRows<T>& product) = nullptr;  // rows of b are contiguous
  int64_t stripe_rows = 0;  // rows of which multiply_stripes() reads b once
  DepthwiseKernels<T> depthwise;
  // Of float32 alone.
  DepthwiseKernels<T, c10::BFloat16> depthwise_bfloat16;
  DepthwiseKernels<T, c10::Half> depthwise_half;
  TileTransforms<T> tiles;
  void (*lstm)(const LstmRow<T>& row) = nullptr;
  void (*lstm_grad)(const LstmRowGrad<T>& row) = nullptr;
  void (*gru)(const GruRow<T>& row) = nullptr;
  void (*gru_grad)(const GruRowGrad<T>& row) = nullptr;
  RegisterLoop peak;
  // A copy that does not read the target into the caches. Both are aligned to 64 bytes, and
  // `num_bytes` is a multiple of these.
  void (*copy_past_caches)(char* to, const char* from, int64_t num_bytes) = nullptr;
  Rows expand_rows = nullptr;  // each number of row r of d becomes a[r]
  // d[i] = 1 with probability `keep`, else 0. It is a function of the other arguments and of the
  // position `begin` + i alone: Philox 4x32 with 10 rounds (Salmon et al., "Parallel random
  // numbers: as easy as 1, 2, 3", 2011).
  void (*random_mask)(T* d, uint64_t seed, uint64_t stream, int64_t begin, int64_t n,
                      double keep) = nullptr;
  // Optimizer steps over n numbers. `buffer` is nullptr without momentum, `largest` without
  // amsgrad.
  void (*sgd)(T* parameter, const T* gradient, T* buffer, int64_t n, const SgdRule& rule) = nullptr;
  void (*adam)(T* parameter, const T* gradient, T* mean, T* square, T* largest, int64_t n,
               const AdamRule& rule) = nullptr;
  // Computes r of LAMB. If `gradient` is nullptr the means are not updated.
  void (*lamb)(T* direction, const T* parameter, const T* gradient, T* mean, T* square, int64_t n,
               const LambRule& rule) = nullptr;
  // Sums in float64. For float32 the result is finite exactly if all numbers are, and the same on
  // all processors.
  double (*sum_squares)(const T* a, int64_t n) = nullptr;
  // By the ir::DType of the memory; nullptr for a dtype that is not a number.
  std::array<Load, kNumDTypes> load{};
  std::array<Store, kNumDTypes> store{};
};

// Products of bfloat16, summed in float32. A step of the sums takes a pair of numbers of each
// factor, which has the size of one float32. The number of steps is a multiple of `pairs_at_once`.
struct PairKernels {
  void (*multiply)(const PanelProduct<float>& product) = nullptr;
  void (*pack)(const PairPacking& packing) = nullptr;
  int64_t pairs_at_once = 1;
  RegisterLoop peak;
};

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512, kNeon };

// The widest instruction set that the processor has.
Isa best_isa();
// Tests let best_isa() give another one that the processor has; nullopt: the widest again.
void plant_isa(std::optional<Isa> isa);
// From the name of one that was built for this kind of processor: "portable", and "avx2", "avx512"
// or "neon". Throws UserError on another name, and if the processor lacks it.
Isa isa_from_name(std::string_view name);
Isa isa_or_best(std::string_view name);  // best_isa() if the name is empty
bool is_amd();                           // whether the processor is one of AMD's
std::vector<Isa> available_isas();       // all that the processor has, the widest last
const char* name(Isa isa);
// nullptr if the instruction set, or this processor, has no products of bfloat16.
const PairKernels* pair_kernels(Isa isa);

template <typename T>
const Kernels<T>& kernels(Isa isa);  // T is float or double

}  // namespace torch_ort::cpu
