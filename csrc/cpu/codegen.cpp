// The code generator of the CPU, as passes and run/ see it.
#include "cpu/product.h"
#include "cpu/program.h"
#include "cpu/region.h"

namespace torch_ort::cpu {

namespace {

constexpr region::KernelRow kKernels[] = {
    {"Attention", make_attention},
    {"AttentionGrad", make_attention_grad},
    {"Convolution", make_convolution},
    {"ConvolutionWeightGrad", make_convolution_weight_grad},
    {"DepthwiseConvolution", make_depthwise_convolution},
    {"DepthwiseWeightGrad", make_depthwise_weight_grad},
    {"EmbeddingGrad", make_embedding_grad},
    {"EmbeddingGrads", make_embedding_grads},
    {"LinearCrossEntropy", make_linear_loss},
    {"Lookups", make_lookups},
    {"Rows", make_rows},
    {"RowsProduct", make_rows_product},
    {"Take", make_take},
    {"TakeGrad", make_take_grad},
    {"WinogradConvolution", make_winograd_convolution},
    {"WinogradWeightGrad", make_winograd_weight_grad},
    {"ZeroRows", make_zero_rows},
};

class Codegen final : public region::Codegen {
 public:
  bool takes(const ir::Type& type) const override { return can_load(type.dtype); }
  std::span<const region::KernelRow> kernels() const override { return kKernels; }
  bool has_wide_products() const override { return false; }
  // oneDNN's come to 0.3 to 0.6 of the peak with 16 registers, and its kernels for AVX-512 are fast
  // for all sizes on Intel's processors alone.
  bool has_fast_convolutions() const override { return best_isa() != Isa::kAvx2 && !is_amd(); }

  std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                        const ir::SymbolLookup& lookup,
                                        const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs,
                                        const region::CodegenOptions& options) const override {
    return cpu::compile(schedule, lookup, inputs, outputs, options_from(options));
  }

  std::unique_ptr<const Kernel> compile(const region::Product& product,
                                        const region::CodegenOptions& options) const override {
    return is_of_floats(product) ? make_product(product, isa_or_best(options.target)) : nullptr;
  }
  std::unique_ptr<const Kernel> compile_copy(const Layout& from, const Layout& to,
                                             const region::CodegenOptions& options) const override {
    return make_copy(from, to, isa_or_best(options.target));
  }
  bool prefers(const region::Product& product,
               const region::CodegenOptions& options) const override {
    return is_preferred(product, isa_or_best(options.target));
  }
  std::string target(const region::CodegenOptions& options) const override {
    return name(isa_or_best(options.target));
  }

 private:
  static CompileOptions options_from(const region::CodegenOptions& options) {
    return {.isa = isa_or_best(options.target), .round_short_floats = options.round_short_floats};
  }
};

}  // namespace

const region::Codegen& codegen() {
  static const Codegen one;
  return one;
}

}  // namespace torch_ort::cpu
