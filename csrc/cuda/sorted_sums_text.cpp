#include "cuda/sorted_sums_text.h"

#include "base/error.h"
#include "cuda/text.h"

namespace torch_ort::cuda {

namespace {

std::string head(bool is_double, bool wide_index) {
  return concat(type_head(is_double, wide_index), prelude(), "\n", sorted_sums_prelude(), "\n");
}

// So many blocks should share a multiprocessor, which leaves a thread 64 or 80 registers. Without
// this hint ptxas may give it so few that they spill.
constexpr int kSortBlocks = 4, kSumBlocks = 3;

template <typename... Parts>
std::string kernel(int blocks, const char* name, const Parts&... parts) {
  return concat("extern \"C\" __global__ void __launch_bounds__(256, ", blocks, ")\n", name, "(",
                parts...);
}

// The parameters of all kernels that sort ids, or keys, and what they make of them.
constexpr const char* kOfIds =
    "const Id* ids, const __grid_constant__ Axes axes, u32 rows, u32 below_zero, u32* fault,\n"
    "    u32 kind, ";
constexpr const char* kFromIds =
    "const Ids<Id> from = {ids, axes, rows, below_zero, fault, kind};\n  ";
constexpr const char* kOfKeys = "const u32* keys, const u32* numbers,\n    ";
constexpr const char* kFromKeys = "const Keys from = {keys, numbers};\n  ";
constexpr const char* kOfDigit = "u32 num_ids, u32 of_block, int shift, int bits";
constexpr const char* kDigit = "share_of_block(num_ids, of_block), {shift, bits}";
constexpr const char* kShared =
    "  SHARED(memory);\n  u32* const shared = reinterpret_cast<u32*>(memory);\n  ";

std::string count_kernel(const char* name, const char* given, const char* from) {
  return kernel(kSortBlocks, name, given, kOfDigit, ", u32* counts) {\n", kShared, from,
                "count(from, ", kDigit, ", counts, shared);\n}\n");
}
std::string place_kernel(const char* name, const char* given, const char* from) {
  return kernel(kSortBlocks, name, given, kOfDigit,
                ", const u32* counts,\n    u32* to_keys, u32* to_numbers) {\n", kShared, from,
                "place(from, ", kDigit, ", counts, gridDim.x, to_keys, to_numbers, shared);\n}\n");
}

// The parameters of the kernels of sums, and what they make of them.
constexpr const char* kOfGradient =
    "const Element* gradient, const __grid_constant__ Axes of_rows,\n"
    "    const __grid_constant__ Columns of_columns, const u32* keys, const u32* numbers,\n"
    "    u32 num_ids, u32 rows, u32 padding, index_t columns, u32 strips, index_t width";
constexpr const char* kGiven =
    "Rows{gradient, of_rows, of_columns}, {keys, numbers, num_ids},\n"
    "      rows, padding, columns, strips, width, parts";

}  // namespace

SumsText sort_text(ir::DType ids) {
  const std::string name = concat("sorted_sums_sort_", element(ids));
  std::string text =
      concat(head(/*is_double=*/false, /*wide_index=*/false), "typedef ", element(ids), " Id;\n");
  text += kernel(kSortBlocks, "sorted_sums_sort", kOfIds,
                 "u32 num_ids, int num_digits, int bits, const __grid_constant__ Sorted sorted) "
                 "{\n",
                 kShared, kFromIds, "sort_few(from, num_ids, num_digits, bits, sorted, shared);\n",
                 "}\n");
  text += count_kernel("sorted_sums_count_ids", kOfIds, kFromIds);
  text += place_kernel("sorted_sums_place_ids", kOfIds, kFromIds);
  text += count_kernel("sorted_sums_count_keys", kOfKeys, kFromKeys);
  text += place_kernel("sorted_sums_place_keys", kOfKeys, kFromKeys);
  return {name, text};
}

SumsText sums_text(const GradientForm& form) {
  const std::string name = concat(
      "sorted_sums_", element(form.dtype), "_", form.vector, form.rows_are_run ? "" : "_dims",
      form.columns_are_run ? "" : "_apart", form.wide_index ? "_wide" : "");
  const auto word = [](bool is_run) { return is_run ? "true" : "false"; };
  std::string text =
      concat(head(form.dtype == ir::DType::kDouble, form.wide_index), "typedef ",
             element(form.dtype), " Element;\ntypedef Gradient<", word(form.rows_are_run), ", ",
             word(form.columns_are_run), ", Element> Rows;\n");
  text +=
      kernel(kSumBlocks, "sorted_sums_parts", kOfGradient, ", wide* parts) {\n  SHARED(memory);\n",
             "  add_parts<", form.vector, ">(", kGiven, ", reinterpret_cast<wide*>(memory));\n}\n");
  text += kernel(kSumBlocks, "sorted_sums_table", kOfGradient,
                 ", const wide* parts, Element* table) {\n  SHARED(memory);\n", "  write_table<",
                 form.vector, ">(", kGiven,
                 ", table,\n      reinterpret_cast<u32*>(memory),"
                 " reinterpret_cast<wide*>(memory + kBoundBytes));\n}\n");
  return {name, text};
}

}  // namespace torch_ort::cuda
