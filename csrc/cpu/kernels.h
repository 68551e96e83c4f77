// The instruction set of tile programs: short loops over numbers that stand in a row of memory.
// Built once per instruction set of the processor (kernels_<isa>.cpp), picked when the process
// first needs one.
#pragma once

#include "ir/type.h"
#include "ops/fusion.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace torch_ort::cpu {

// Truth values are the numbers 0 and 1.
using Opcode = ops::Pointwise;
constexpr size_t kNumOpcodes = static_cast<size_t>(Opcode::kCount);

// Operands that are one number, as bits: 1 for the first, 2 for the second, 4 for the third.
constexpr size_t kNumVariants = 8;
constexpr size_t kNumDTypes = 17;  // the numbers of ir::DType

// c <- start + a * b. a: m x k, element (i, p) at a[i * a_row + p * a_column], or packed: panels of
// Kernels::product_rows rows. b: panels of `width` columns and k rows, b_panel apart, whose rows
// are b_row apart. c: m rows of `columns` numbers; the last panel may be wider than what is left of
// them. `width` is Kernels::panel_width or half of it.
template <typename T>
struct PanelProduct {
  T* c;
  int64_t c_row;
  const T* start = nullptr;  // rows of numbers as those of c, which it may be; nullptr: zeros
  int64_t start_row = 0;
  const T* a;
  int64_t a_row = 0, a_column = 0;
  bool a_is_packed = false;
  const T* b;
  int64_t b_row, b_panel, width, num_panels, columns, m, k;
};

// A panel of a factor: for each of `steps` steps of the sum `width` numbers side by side, of which
// number j of step p comes from from[j * across + p * along]. Those from `count` on are zeros.
// `width` is Kernels::product_rows, Kernels::panel_width or half of it.
template <typename T>
struct Packing {
  T* to;
  int64_t width, steps;
  const T* from;
  int64_t across, along, count;
};

// The same for pairs of bfloat16 (as bits): step p has numbers 2 * p and 2 * p + 1, of `numbers`.
// What is missing to the last pair is zero.
struct PairPacking {
  float* to;
  int64_t width, numbers;
  const uint16_t* from;
  int64_t across, along, count;
};

// Sums of products of numbers that stay in registers, so many at once that only the number of
// multiplying units limits them: as fast as any product can be.
struct RegisterLoop {
  double (*run)(int64_t rounds) = nullptr;  // gives the sum of the sums
  int64_t operations = 0;                   // multiplications and additions of a round
};

// What one step of an optimizer does to a parameter p with the gradient g, the running mean m of
// the gradient, and v of its square. SGD is that of torch.optim.
struct SgdRule {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  bool is_first = false;  // the gradient becomes the momentum buffer, whatever that holds
};
// g <- gradient_factor g + weight_decay p;  m <- beta1 m + (1 - beta1) g;
// v <- beta2 v + (1 - beta2) g^2;  p <- keep p - step_size m / (sqrt(v) inverse_correction + eps)
struct AdamRule {
  double step_size = 0, inverse_correction = 1;
  double beta1 = 0, beta2 = 0, eps = 0;
  double weight_decay = 0, keep = 1;
  double gradient_factor = 1;  // takes back a scale, clips; below 0 it maximizes
};
// LAMB (You et al., "Large batch optimization for deep learning", 2020). m and v as above, then
// r = mean_correction m / (sqrt(v) inverse_correction + eps) + weight_decay p;
// p <- p - lr |p| / |r| r, where the ratio of norms stays within its limits, and is 1 if one of
// them is 0.
struct LambRule {
  double lr = 0, mean_correction = 1, inverse_correction = 1;
  double beta1 = 0, beta2 = 0, eps = 0;
  double weight_decay = 0;
  double ratio_min = 0, ratio_max = 0;
  double gradient_factor = 1;
};

// Numbers of a tensor in memory: `count` runs of `n`, with strides in elements. Registers hold them
// one behind the other.
struct Runs {
  int64_t n, stride = 1;
  int64_t count = 1, distance = 0;
};

// Each kernel reads and writes `n` numbers. `d` may be an operand, but may not overlap one
// otherwise.
template <typename T>
struct Kernels {
  using Elementwise = void (*)(T* d, const T* a, const T* b, const T* c, int64_t n);
  using Load = void (*)(T* d, const void* source, const Runs& runs);
  using Store = void (*)(void* target, const T* a, const Runs& runs);

  // A missing variant is nullptr.
  std::array<std::array<Elementwise, kNumVariants>, kNumOpcodes> elementwise{};
  // `a`: rows of n numbers, one behind the other.
  using Rows = void (*)(T* d, const T* a, int64_t rows, int64_t n);
  Rows sum_rows = nullptr;  // d[r] += sum of row r
  Rows max_rows = nullptr;  // d[r] = the largest of d[r] and row r; NaN if there is one
  Rows min_rows = nullptr;
  Rows add_rows = nullptr;  // d += each row
  // d = exp(a - shift), within two units in the last place; returns the sum.
  T (*exp_row)(T* d, const T* a, T shift, int64_t n) = nullptr;
  void (*multiply)(const PanelProduct<T>& product) = nullptr;
  void (*pack)(const Packing<T>& packing) = nullptr;
  int64_t panel_width = 0, product_rows = 0;
  RegisterLoop peak;
  Rows expand_rows = nullptr;  // d: rows of n numbers, row r full of a[r]
  // d[i] = 1 with the probability `keep`, else 0: a function of the other arguments and of the
  // place `begin` + i alone. Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers:
  // as easy as 1, 2, 3", 2011).
  void (*random_mask)(T* d, uint64_t seed, uint64_t stream, int64_t begin, int64_t n,
                      double keep) = nullptr;
  // Over n numbers. Without momentum there is no buffer, without amsgrad no largest square.
  void (*sgd)(T* parameter, const T* gradient, T* buffer, int64_t n, const SgdRule& rule) = nullptr;
  void (*adam)(T* parameter, const T* gradient, T* mean, T* square, T* largest, int64_t n,
               const AdamRule& rule) = nullptr;
  // Computes r of LAMB; without a gradient from the means as they are.
  void (*lamb)(T* direction, const T* parameter, const T* gradient, T* mean, T* square, int64_t n,
               const LambRule& rule) = nullptr;
  // In float64: of float32 it is finite exactly if all numbers are, and the same on all processors.
  double (*sum_squares)(const T* a, int64_t n) = nullptr;
  // By ir::DType, which memory holds; nullptr where it is no number.
  std::array<Load, kNumDTypes> load{};
  std::array<Store, kNumDTypes> store{};
};

// Products of bfloat16, summed in float32: a step of the sums takes two numbers of each factor, a
// pair in the place of one number of float32.
struct PairKernels {
  void (*multiply)(const PanelProduct<float>& product) = nullptr;
  void (*pack)(const PairPacking& packing) = nullptr;
  RegisterLoop peak;
};

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512 };

// The widest that this processor runs.
Isa best_isa();
// "portable", "avx2", "avx512"; UserError on another name, or if the processor lacks it.
Isa isa_from_name(std::string_view name);
Isa isa_or_best(std::string_view name);  // the widest if none is named
std::vector<Isa> available_isas();       // that this processor runs, the widest last
const char* name(Isa isa);
// nullptr where the instruction set, or this processor, does not multiply numbers of bfloat16.
const PairKernels* pair_kernels(Isa isa);

template <typename T>
const Kernels<T>& kernels(Isa isa);  // float and double

}  // namespace torch_ort::cpu
