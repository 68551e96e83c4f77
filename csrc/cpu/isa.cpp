// Which of the kernel tables this processor runs.
#include "base/error.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <atomic>
#include <optional>
#include <string>

namespace torch_ort::cpu {

const Kernels<float>& float_kernels_portable();
const Kernels<double>& double_kernels_portable();
#if defined(__x86_64__)
const Kernels<float>& float_kernels_avx2();
const Kernels<double>& double_kernels_avx2();
const Kernels<float>& float_kernels_avx512();
const Kernels<double>& double_kernels_avx512();
const PairKernels& pair_kernels_avx512();
#elif defined(__aarch64__)
const Kernels<float>& float_kernels_neon();
const Kernels<double>& double_kernels_neon();
const PairKernels& pair_kernels_neon();
#endif

namespace {

// What was built for this kind of processor. A processor runs a set if it has the instructions that
// the compiler may use in its files (see CMakeLists.txt).
struct Set {
  Isa isa;
  const char* name;
  bool (*runs)();
  const Kernels<float>& (*of_float)();
  const Kernels<double>& (*of_double)();
  bool (*has_pairs)() = [] { return false; };
  const PairKernels& (*of_pairs)() = nullptr;
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  // Conversions of 16-bit floats. Clang 15 does not know their name in __builtin_cpu_supports.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
}

bool multiplies_bfloat16() { return __builtin_cpu_supports("avx512bf16"); }
#elif defined(__aarch64__)
bool multiplies_bfloat16() { return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#endif

// The widest last.
constexpr Set kSets[] = {
    {Isa::kPortable, "portable", always, float_kernels_portable, double_kernels_portable},
#if defined(__x86_64__)
    {Isa::kAvx2, "avx2", has_avx2, float_kernels_avx2, double_kernels_avx2},
    {Isa::kAvx512, "avx512", has_avx512, float_kernels_avx512, double_kernels_avx512,
     multiplies_bfloat16, pair_kernels_avx512},
#elif defined(__aarch64__)
    {Isa::kNeon, "neon", always, float_kernels_neon, double_kernels_neon, multiplies_bfloat16,
     pair_kernels_neon},
#endif
};

const Set& set_of(Isa isa) {
  for (const Set& set : kSets) {
    if (set.isa == isa) return set;
  }
  throw InternalError("isa: this build has no such instruction set");
}

std::atomic<std::optional<Isa>> planted;

}  // namespace

Isa best_isa() {
  static const Isa best = available_isas().back();
  return planted.load(std::memory_order_relaxed).value_or(best);
}

bool is_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

void plant_isa(std::optional<Isa> isa) { planted.store(isa, std::memory_order_relaxed); }

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Set& set : kSets) {
    if (set.runs()) isas.push_back(set.isa);
  }
  return isas;
}

const char* name(Isa isa) { return set_of(isa).name; }

const PairKernels* pair_kernels(Isa isa) {
  const Set& set = set_of(isa);
  return set.has_pairs() ? &set.of_pairs() : nullptr;
}

Isa isa_from_name(std::string_view text) {
  std::string names;
  for (const Set& set : kSets) {
    if (text != set.name) {
      names += concat(names.empty() ? "" : ", ", set.name);
      continue;
    }
    if (!set.runs()) throw UserError(concat("isa: this processor does not run '", text, "'"));
    return set.isa;
  }
  throw UserError(concat("isa: got '", text, "', want one of ", names));
}

Isa isa_or_best(std::string_view name) { return name.empty() ? best_isa() : isa_from_name(name); }

template <>
const Kernels<float>& kernels<float>(Isa isa) {
  return set_of(isa).of_float();
}

template <>
const Kernels<double>& kernels<double>(Isa isa) {
  return set_of(isa).of_double();
}

}  // namespace torch_ort::cpu
