// A product of matrices: by a kernel of region/codegen.h if the generator has one that is faster
// for these sizes, otherwise by the operator's out= kernel.
//
// On GPUs, PyTorch has cuBLASLt add the bias of a linear layer. Its other epilogues, for GELU, for
// the gradient of GELU and for the gradient of a bias, were weighed and not taken. By the bytes
// that they save, a step would gain very little (benchmarks/results/decisions.md). They know only
// the approximation of GELU by tanh, and the products that have them are slower ones. In exchange
// the regions around products would lose what they fuse now: dropout, residuals, norms and the sums
// for biases.
#pragma once

#include "ops/product.h"
#include "region/codegen.h"
#include "run/steps/functional.h"
#include "run/steps/out.h"
#include "run/tuning.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_ort::run {

// The slots of result <- start + a * b.
struct ProductSlots {
  int a, b;
  int start = -1;  // -1: nothing is added
  int result;
};

struct ProductStep : OutStep {
  const region::Codegen& codegen;
  ProductSlots slots;
  bool may_overwrite = false;

  ProductStep(OutStep out, const region::Codegen& generator, const CallSite& site,
              const ops::ProductArgs& args);

  // A start as large as the result, unless it is a factor too. The engine's kernel has read an
  // element when it writes it, and the out= kernel of PyTorch on the CPU adds to the result after
  // it has copied the start there.
  std::vector<int> in_place() const override {
    return may_overwrite ? std::vector<int>{slots.start} : std::vector<int>{};
  }

  std::unique_ptr<BoundStep> bind(Binder& binder) const override;

 private:
  // Nothing if the operator has to run: the sizes in a file may not fit each other, for which the
  // operator raises its own error.
  std::optional<region::Product> product(const Binder& binder) const;
  // nullptr: the operator's kernel is to run.
  std::unique_ptr<const region::Kernel> kernel_for(const region::Product& product,
                                                   const Binder& binder) const;
  // Times both kernels, on tensors of their own.
  KernelChoice measure(const std::string& text, const region::Kernel& own, bool prefers_own,
                       const Binder& binder) const;
};

// A product in float32 of matrices of short floats, which allocates its result.
struct WideProductStep : FunctionalStep {
  ProductSlots slots;

  WideProductStep(const CallSite& site, const ops::ProductArgs& args);
  std::unique_ptr<BoundStep> bind(Binder& binder) const override;
};

}  // namespace torch_ort::run
