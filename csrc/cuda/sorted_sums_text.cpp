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
  text += kernel(
      kSortBlocks, "sorted_sums_sort",
      "const Id* ids, const __grid_constant__ Axes axes, u32 rows, u32 below_zero, u32* fault,\n"
      "    u32 kind, u32 num_ids, u32 of_block, Digits digits,\n"
      "    const __grid_constant__ Sorted sorted) {\n"
      "  SHARED(memory);\n"
      "  const Source<Id> from = {ids, axes, rows, below_zero, fault, kind, nullptr, nullptr};\n"
      "  sort(from, share_of_block(num_ids, of_block), digits, sorted,\n"
      "       reinterpret_cast<u32*>(memory));\n}\n");
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
