#include "cuda/optimizer_text.h"

#include "base/error.h"
#include "cuda/text.h"

#include <algorithm>
#include <array>

namespace torch_ort::cuda {

namespace {

using ir::DType;

constexpr int64_t kVectorBytes = 16;

// The parameters of all update kernels (see optimizer.cuh).
constexpr const char* kTable = "const u32* ends, const Tensor* tensors, int num_tensors";
constexpr const char* kRules = "const Step* step, const Rule* rules";
constexpr const char* kGiven = "ends, tensors, num_tensors";

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat: return "f32";
    case DType::kDouble: return "f64";
    default: return element(dtype);
  }
}

constexpr std::array<const char*, 3> kRuleNames = {"sgd", "adam", "lamb"};

const char* rule_name(OptimizerRule rule) { return kRuleNames[static_cast<size_t>(rule)]; }

// The number of elements at a time, so that those of the shortest dtype take 16 bytes.
int64_t vector_of(const std::vector<DType>& dtypes) {
  int64_t vector = 1;
  for (DType dtype : dtypes) vector = std::max(vector, kVectorBytes / ir::size_bytes(dtype));
  return vector;
}

std::string head(bool is_double) {
  return concat(type_head(is_double), prelude(), "\n", optimizer_prelude(), "\n");
}

// With 8 elements at a time two blocks of 256 threads should share a multiprocessor, which leaves
// 128 registers to each thread. Without this hint ptxas would give a thread fewer registers than it
// needs.
template <typename... Parts>
std::string kernel(const std::string& name, int64_t vector, const Parts&... parts) {
  return concat("extern \"C\" __global__ void __launch_bounds__(256", vector == 8 ? ", 2" : "",
                ")\n", name, "(", parts...);
}

std::string arguments(const std::vector<DType>& dtypes) {
  std::string list = concat(vector_of(dtypes));
  for (DType dtype : dtypes) {
    if (!ir::is_float(dtype)) {
      throw InternalError(concat("optimizer step: got an array of ", ir::name(dtype)));
    }
    list += concat(", ", element(dtype));
  }
  return list;
}

}  // namespace

OptimizerRule optimizer_rule_from_name(std::string_view name) {
  for (size_t i = 0; i < kRuleNames.size(); ++i) {
    if (name == kRuleNames[i]) return static_cast<OptimizerRule>(i);
  }
  throw UserError(concat("optimizer step: rule: got '", name, "', want sgd, adam or lamb"));
}

OptimizerText begin_text() {
  const std::string name = "begin_step";
  std::string text = head(/*is_double=*/true);
  text += kernel(name, 1,
                 "Step* step, Rule* rules, const Slot* slots, int first_slot, int last_slot,\n"
                 "    int first_settings, const __grid_constant__ Gradients gradients,\n"
                 "    const __grid_constant__ SettingsList settings) {\n"
                 "  begin(step, rules, slots, first_slot, last_slot, first_settings, gradients, "
                 "settings);\n}\n");
  text += kernel("write_words", 1,
                 "u64* to, int count, const __grid_constant__ WordList words) {\n"
                 "  for (int i = threadIdx.x; i < count; i += kThreads) to[i] = words.at[i];\n}\n");
  text += kernel("lamb_rates", 1, "const u32* ends, const Tensor* tensors, ", kRules,
                 ",\n    const double* norms, double* rates) {\n"
                 "  lamb_rate(ends, tensors, step, rules, norms, rates);\n}\n");
  return {name, text};
}

OptimizerText squares_text(DType gradient) {
  const std::string name = concat("sum_squares_", short_name(gradient));
  return {name, head(/*is_double=*/true) +
                    kernel(name, vector_of({gradient}), kTable, ", double* sums) {\n  sum_squares<",
                           arguments({gradient}), ">(", kGiven, ", sums);\n}\n")};
}

OptimizerText update_text(OptimizerRule rule, const std::vector<DType>& dtypes) {
  std::string name = rule_name(rule);
  for (DType dtype : dtypes) name += concat("_", short_name(dtype));
  std::string text = head(dtypes.front() == DType::kDouble);
  const int64_t vector = vector_of(dtypes);
  if (rule != OptimizerRule::kLamb) {
    text += kernel(name, vector, kTable, ", ", kRules, ") {\n  ", rule_name(rule), "<",
                   arguments(dtypes), ">(", kGiven, ", step, rules);\n}\n");
    return {name, text};
  }
  text += kernel(name, vector, kTable, ", ", kRules, ",\n    double* norms) {\n  lamb_means<",
                 arguments(dtypes), ">(", kGiven, ", step, rules, norms);\n}\n");
  const std::vector<DType> moved = {dtypes[0], dtypes[2], dtypes[3]};
  text += kernel(name + "_move", vector, kTable, ", ", kRules,
                 ",\n    const double* rates) {\n  lamb_move<", arguments(moved), ">(", kGiven,
                 ", step, rules, rates);\n}\n");
  return {name, text};
}

}  // namespace torch_ort::cuda
