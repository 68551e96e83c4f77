// The code generator of CUDA, as passes and run/ see it.
#include "base/error.h"
#include "cuda/casts.h"
#include "cuda/driver.h"
#include "cuda/linear_loss.h"
#include "cuda/region.h"
#include "cuda/settings.h"
#include "cuda/sorted_sums.h"

namespace torch_ort::cuda {

namespace {

using region::Kernel;
using region::Layout;

constexpr region::KernelRow kKernels[] = {
    {"Casts", make_casts},
    {"EmbeddingGrad", make_sorted_sums, /*sorts_ids=*/true},
    {.op = "LinearCrossEntropy", .make = make_linear_loss, .uses_library = true},
    {"TakeGrad", make_sorted_sums, /*sorts_ids=*/true},
};

class Codegen final : public region::Codegen {
 public:
  bool takes(const ir::Type& type) const override {
    if (!can_load(type.dtype) || !Driver::missing().empty()) return false;
    constexpr int kFirstWithBFloat16 = 8;
    return type.dtype != ir::DType::kBFloat16 ||
           Driver::get().device(std::max(0, type.device.index)).major >= kFirstWithBFloat16;
  }
  std::span<const region::KernelRow> kernels() const override { return kKernels; }
  bool has_wide_products() const override { return cuda::has_wide_products(); }
  bool has_fast_convolutions() const override { return true; }

  std::unique_ptr<const Kernel> compile(const region::Schedule& schedule,
                                        const ir::SymbolLookup& lookup,
                                        const std::vector<Layout>& inputs,
                                        const std::vector<Layout>& outputs,
                                        const region::CodegenOptions& options) const override {
    return make_region(schedule, lookup, inputs, outputs, options);
  }

  std::unique_ptr<const Kernel> compile(const region::Product& /*product*/,
                                        const region::CodegenOptions& /*options*/) const override {
    return nullptr;
  }
  // Copies in words are PyTorch's (run/word_copy.h).
  std::unique_ptr<const Kernel> compile_copy(
      const Layout& /*from*/, const Layout& /*to*/,
      const region::CodegenOptions& /*options*/) const override {
    return nullptr;
  }
  bool prefers(const region::Product& /*product*/,
               const region::CodegenOptions& /*options*/) const override {
    return false;
  }
  std::string target(const region::CodegenOptions& options) const override {
    return Driver::get().device(std::max(0, options.device)).architecture();
  }
};

}  // namespace

const region::Codegen& codegen() {
  static const Codegen one;
  return one;
}

}  // namespace torch_ort::cuda
