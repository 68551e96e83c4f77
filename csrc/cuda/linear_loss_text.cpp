#include "cuda/linear_loss_text.h"

#include "base/error.h"
#include "cuda/text.h"

namespace torch_ort::cuda {

namespace {

struct Constant {
  const char* name;
  const char* letter;  // in the name of the text
  bool value;
};

template <typename... Parts>
std::string kernel(int threads, const char* name, const Parts&... parts) {
  return concat("extern \"C\" __global__ void __launch_bounds__(", threads, ")\n", name, "(",
                parts..., "}\n");
}

}  // namespace

LossText loss_text(const ops::LinearLoss& form, ir::DType logits, ir::DType class_weight) {
  const bool is_double = logits == ir::DType::kDouble;
  const Constant constants[] = {{"kHasClassWeight", "w", form.has_class_weight},
                                {"kHasCap", "t", form.soft_cap != 0},
                                {"kHasCopy", "x", form.has_logits},
                                {"kHasSums", "s", form.has_sums},
                                {"kHasLogSumExp", "z", form.has_logsumexp},
                                {"kIsMean", "m", form.is_mean()},
                                {"kHasGrad", "g", form.has_grad()},
                                {"kHasLossGrad", "l", form.has_loss_grad},
                                {"kHasSumsGrad", "u", form.has_sums_grad},
                                {"kHasSquareGrad", "q", form.has_square_grad}};
  std::string letters, struct_text = "struct Form {\n  enum : bool {\n";
  for (const Constant& each : constants) {
    if (each.value) letters += each.letter;
    struct_text += concat("    ", each.name, " = ", each.value ? "true" : "false", ",\n");
  }
  struct_text += "  };\n};\n";
  const char* of_classes = form.has_class_weight ? element(class_weight) : "float";
  std::string name = concat("linear_loss_", element(logits));
  if (form.has_class_weight) name += concat("_", of_classes);
  if (!letters.empty()) name += concat("_", letters);

  std::string text =
      concat(type_head(is_double), prelude(), "\ntypedef ", element(logits), " Element;\ntypedef ",
             of_classes, " ClassWeight;\n", struct_text, linear_loss_prelude(), "\n");
  constexpr int kThreads = 512;
  text +=
      kernel(kThreads, "linear_loss_weights",
             "const __grid_constant__ Labels labels, i64 rows,\n"
             "    const __grid_constant__ Classes classes, wide* totals) {\n"
             "  SHARED(memory);\n"
             "  sum_weights(labels, rows, classes, totals, reinterpret_cast<wide*>(memory));\n");
  text += kernel(kThreads, "linear_loss_rows",
                 "const __grid_constant__ Chunk chunk) {\n  SHARED(memory);\n"
                 "  compute_row(chunk, reinterpret_cast<wide*>(memory));\n");
  text += kernel(kThreads, "linear_loss_sum",
                 "const wide* losses, index_t rows, int is_first, int is_last, wide* totals,\n"
                 "    wide* loss) {\n  SHARED(memory);\n"
                 "  sum_losses(losses, rows, is_first, is_last, totals, loss,\n"
                 "             reinterpret_cast<wide*>(memory));\n");
  if (form.has_bias_grad) {
    text += kernel(256, "linear_loss_bias",
                   "const Element* gradient, i64 row_stride, index_t rows, index_t columns,\n"
                   "    wide factor, int is_first, wide* bias_grad) {\n  SHARED(memory);\n"
                   "  sum_rows(gradient, row_stride, rows, columns, factor, is_first, bias_grad,\n"
                   "           reinterpret_cast<wide*>(memory));\n");
  }
  return {name, text};
}

}  // namespace torch_ort::cuda
