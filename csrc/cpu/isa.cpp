// Which of the kernel tables this processor runs.
#include "base/error.h"
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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
#endif

namespace {

#if defined(__x86_64__)
// Conversions of 16-bit floats. Clang 15 does not know their name in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

bool runs(Isa isa) {
#if defined(__x86_64__)
  // The instructions that the compiler may use in the files of each set (see CMakeLists.txt).
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           runs(Isa::kAvx2);
  }
  if (isa == Isa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
#endif
  return isa == Isa::kPortable;
}

}  // namespace

Isa best_isa() {
  static const Isa best = runs(Isa::kAvx512) ? Isa::kAvx512
                          : runs(Isa::kAvx2) ? Isa::kAvx2
                                             : Isa::kPortable;
  return best;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (runs(isa)) isas.push_back(isa);
  }
  return isas;
}

const char* name(Isa isa) {
  return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "portable";
}

const PairKernels* pair_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16")) return &pair_kernels_avx512();
#endif
  return nullptr;
}

Isa isa_from_name(std::string_view text) {
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (text != name(isa)) continue;
    if (!runs(isa)) throw UserError(concat("isa: this processor does not run '", text, "'"));
    return isa;
  }
  throw UserError(concat("isa: got '", text, "', want one of portable, avx2, avx512"));
}

Isa isa_or_best(std::string_view text) { return text.empty() ? best_isa() : isa_from_name(text); }

template <>
const Kernels<float>& kernels<float>(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return float_kernels_avx512();
  if (isa == Isa::kAvx2) return float_kernels_avx2();
#endif
  return float_kernels_portable();
}

template <>
const Kernels<double>& kernels<double>(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return double_kernels_avx512();
  if (isa == Isa::kAvx2) return double_kernels_avx2();
#endif
  return double_kernels_portable();
}

}  // namespace torch_ort::cpu
