// A product of matrices: by a kernel of region/codegen.h where the generator has one that is faster
// for these sizes, else by the operator's out= kernel.
#include "ops/product.h"

#include "region/codegen.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/steps/kernel.h"
#include "run/steps/out.h"

#include <ATen/record_function.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

struct ProductStep : OutStep {
  const region::Codegen& codegen;
  int a, b, start;  // slots; start: -1 if there is none

  ProductStep(OutStep out, const region::Codegen& generator, const CallSite& site,
              const ops::ProductArgs& args)
      : OutStep(std::move(out)),
        codegen(generator),
        a(site.slot(args.a)),
        b(site.slot(args.b)),
        start(args.start == nullptr ? -1 : site.slot(args.start)) {}

  std::unique_ptr<BoundStep> bind(Binder& binder) const override;

 private:
  // Nothing where the operator has to be asked: sizes of a file need not fit each other, and the
  // error is the operator's own.
  std::optional<region::Product> product(const Binder& binder) const;
};

struct BoundProduct : BoundKernel {
  std::string name;  // of the operator, for profilers

  BoundProduct(const ProductStep& of, Binder& binder, std::vector<int> slots,
               std::shared_ptr<const region::Kernel> made)
      : BoundKernel(of, binder, std::move(slots), std::move(made), &StepCounts::product),
        name(of.op.schema().name()) {}

  const char* form() const override { return "product"; }

 protected:
  void write(Context& context, StepCounts& counts) const override {
    // Profilers see the operator that a dispatcher would have called, with its arguments.
    std::vector<c10::IValue> arguments;
    at::RecordFunction event(at::RecordScope::FUNCTION);
    if (event.isActive()) {
      if (operands.size() == 3) arguments.emplace_back(context.slots[operands[2]]);
      arguments.emplace_back(context.slots[operands[0]]);
      arguments.emplace_back(context.slots[operands[1]]);
      event.before(name, c10::ArrayRef<const c10::IValue>(arguments.data(), arguments.size()));
    }
    BoundKernel::write(context, counts);
  }
};

bool broadcasts(const region::Layout& from, const region::Layout& to) {
  if (from.sizes.size() > to.sizes.size()) return false;
  const size_t missing = to.sizes.size() - from.sizes.size();
  for (size_t i = 0; i < from.sizes.size(); ++i) {
    if (from.sizes[i] != to.sizes[missing + i] && from.sizes[i] != 1) return false;
  }
  return true;
}

// With as many dims as `like`.
region::Layout expanded(region::Layout layout, const region::Layout& like) {
  const size_t missing = like.sizes.size() - layout.sizes.size();
  layout.sizes.insert(layout.sizes.begin(), missing, 1);
  layout.strides.insert(layout.strides.begin(), missing, 0);
  return layout;
}

std::optional<region::Product> ProductStep::product(const Binder& binder) const {
  for (int slot : {a, b, outputs[0]}) {
    if (!binder.spec(slot).known) return std::nullopt;
  }
  region::Product product{layout_of(outputs[0], binder), layout_of(a, binder), layout_of(b, binder),
                          std::nullopt};
  const std::vector<int64_t>&left = product.a.sizes, &right = product.b.sizes;
  const std::vector<int64_t>& result = product.result.sizes;
  const size_t rank = result.size();
  if (rank < 2 || left.size() != rank || right.size() != rank ||
      left[rank - 1] != right[rank - 2] || left[rank - 2] != result[rank - 2] ||
      right[rank - 1] != result[rank - 1] ||
      !std::equal(left.begin(), left.end() - 2, result.begin()) ||
      !std::equal(right.begin(), right.end() - 2, result.begin())) {
    return std::nullopt;
  }
  if (start < 0) return product;
  if (!binder.spec(start).known) return std::nullopt;
  const region::Layout begin = layout_of(start, binder);
  if (!broadcasts(begin, product.result)) return std::nullopt;
  product.start = expanded(begin, product.result);
  return product;
}

std::unique_ptr<BoundStep> ProductStep::bind(Binder& binder) const {
  const std::optional<region::Product> wanted = product(binder);
  std::shared_ptr<const region::Kernel> kernel;
  if (wanted) kernel = codegen.compile(*wanted, binder.graph().options.regions);
  if (kernel == nullptr) return OutStep::bind(binder);
  std::vector<int> operands = {a, b};
  if (start >= 0) operands.push_back(start);
  return std::make_unique<BoundProduct>(*this, binder, std::move(operands), std::move(kernel));
}

}  // namespace

std::unique_ptr<Step> make_product(const CallSite& site) {
  if (!site.options.products) return nullptr;
  const std::optional<ops::ProductArgs> args = ops::find_product(site.call);
  if (!args) return nullptr;
  const ir::Type& type = site.call.outputs[0]->type;
  const region::Codegen* codegen = type.is_known() ? region::codegen_for(type.device) : nullptr;
  std::optional<OutStep> out = codegen == nullptr ? std::nullopt : find_out_step(site);
  if (!out) return nullptr;
  return std::make_unique<ProductStep>(*std::move(out), *codegen, site, *args);
}

}  // namespace torch_ort::run
