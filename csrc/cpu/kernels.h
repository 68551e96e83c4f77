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

// c (+)= a * b, with a: m x k, element (i, p) at a[i * a_row + p * a_column]; b: panels of `width`
// columns and k rows, b_panel apart; c: rows of num_panels * width numbers, c_row apart.
// `width` is Kernels::panel_width or half of it.
template <typename T>
struct PanelProduct {
  T* c;
  int64_t c_row;
  const T* a;
  int64_t a_row, a_column;
  const T* b;
  int64_t b_panel, width, num_panels, m, k;
  bool add;
};

// Sums of products of numbers that stay in registers, so many at once that only the number of
// multiplying units limits them: as fast as any product can be.
struct RegisterLoop {
  double (*run)(int64_t rounds) = nullptr;  // gives the sum of the sums
  int64_t operations = 0;                   // multiplications and additions of a round
};

// What one step of an optimizer does to a parameter; the formulas are those of torch.optim.
struct SgdRule {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  bool is_first = false;  // the gradient becomes the momentum buffer, whatever that holds
};
struct AdamRule {
  double step_size = 0;           // lr / (1 - beta1^t)
  double inverse_correction = 1;  // 1 / sqrt(1 - beta2^t)
  double beta1 = 0, beta2 = 0, eps = 0;
  double weight_decay = 0;  // joins the gradient
  double keep = 1;          // what the parameter is multiplied by: decoupled weight decay
  bool maximize = false;
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
  int64_t panel_width = 0;
  RegisterLoop peak;
  // Products of pairs of bfloat16, summed in float32; only where has_bfloat16_products.
  RegisterLoop bfloat16_peak;
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
  // By ir::DType, which memory holds; nullptr where it is no number.
  std::array<Load, kNumDTypes> load{};
  std::array<Store, kNumDTypes> store{};
};

enum class Isa : uint8_t { kPortable, kAvx2, kAvx512 };

// The widest that this processor runs.
Isa best_isa();
// "portable", "avx2", "avx512"; UserError on another name, or if the processor lacks it.
Isa isa_from_name(std::string_view name);
Isa isa_or_best(std::string_view name);  // the widest if none is named
std::vector<Isa> available_isas();       // that this processor runs, the widest last
const char* name(Isa isa);
// Whether the instruction set, and this processor, multiply numbers of bfloat16.
bool has_bfloat16_products(Isa isa);

template <typename T>
const Kernels<T>& kernels(Isa isa);  // float and double

}  // namespace torch_ort::cpu
