#include "run/steps/product.h"

#include "base/error.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/guard.h"
#include "run/steps/aligned_product.h"
#include "run/steps/kernel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <map>

namespace torch_ort::run {

namespace {

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

// The layout with dims of size 1 in front, so that it has as many dims as `like`.
region::Layout expanded(region::Layout layout, const region::Layout& like) {
  const size_t missing = like.sizes.size() - layout.sizes.size();
  layout.sizes.insert(layout.sizes.begin(), missing, 1);
  layout.strides.insert(layout.strides.begin(), missing, 0);
  return layout;
}

bool is_empty(const region::Product& product) {
  const auto has_zero = [](const region::Layout& layout) {
    return std::find(layout.sizes.begin(), layout.sizes.end(), 0) != layout.sizes.end();
  };
  return has_zero(product.result) || has_zero(product.a);
}

// All that the time of a product depends on: the key of a choice, also in files.
std::string words_for(const region::Product& product, const region::Codegen& codegen,
                      const region::CodegenOptions& options) {
  const int threads = at::get_num_threads();
  return concat(region::text_of(product), ", ", codegen.target(options), ", ", threads,
                threads == 1 ? " thread" : " threads");
}

// A tensor of random numbers between -1 and 1. They repeat, since drawing each would take longer
// than multiplying them. They come from a generator of their own, so that the user's is not
// changed.
at::Tensor numbers_like(const TensorSpec& spec) {
  constexpr int64_t kDrawn = 4099;
  const at::TensorOptions options = at::TensorOptions().dtype(spec.dtype).device(spec.device);
  const at::Generator generator = at::detail::createCPUGenerator(0);
  const at::Tensor drawn = at::empty({kDrawn}, options).uniform_(-1, 1, generator);
  at::Tensor tensor = make_tensor(spec);
  const int64_t count = spec.bytes / static_cast<int64_t>(tensor.element_size());
  const at::Tensor flat = at::from_blob(tensor.mutable_data_ptr(), {count}, options);
  const int64_t whole = count / kDrawn * kDrawn;
  flat.narrow(0, 0, whole)
      .view({whole / kDrawn, kDrawn})
      .copy_(drawn.expand({whole / kDrawn, kDrawn}));
  flat.narrow(0, whole, count - whole).copy_(drawn.narrow(0, 0, count - whole));
  return tensor;
}

ProductSlots slots_of(const CallSite& site, const ops::ProductArgs& args) {
  return {.a = site.slot(args.a),
          .b = site.slot(args.b),
          .start = args.start == nullptr ? -1 : site.slot(args.start),
          .result = site.output_slots().at(0)};
}

}  // namespace

ProductStep::ProductStep(OutStep out, const region::Codegen& generator, const CallSite& site,
                         const ops::ProductArgs& args)
    : OutStep(std::move(out)), codegen(generator), slots(slots_of(site, args)) {
  const auto rank = [](const ir::Value& value) {
    return value.type.shape ? value.type.shape->size() : 0;
  };
  may_overwrite = site.on_cpu && slots.start >= 0 && slots.start != slots.a &&
                  slots.start != slots.b && rank(*args.start) == rank(*site.call.outputs[0]);
}

std::optional<region::Product> ProductStep::product(const Binder& binder) const {
  for (int slot : {slots.a, slots.b, slots.result}) {
    if (!binder.spec(slot).known) return std::nullopt;
  }
  region::Product product{layout_of(slots.result, binder), layout_of(slots.a, binder),
                          layout_of(slots.b, binder), std::nullopt};
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
  if (slots.start < 0) return product;
  if (!binder.spec(slots.start).known) return std::nullopt;
  const region::Layout begin = layout_of(slots.start, binder);
  if (!broadcasts(begin, product.result)) return std::nullopt;
  product.start = expanded(begin, product.result);
  return product;
}

std::unique_ptr<const region::Kernel> ProductStep::kernel_for(const region::Product& product,
                                                              const Binder& binder) const {
  const SessionOptions& options = binder.graph().options;
  bool is_own = codegen.prefers(product, options.regions);
  const bool may_be_other = options.tuning.is_on || has_choices();
  if (!is_own && !may_be_other) return nullptr;
  std::unique_ptr<const region::Kernel> kernel = codegen.compile(product, options.regions);
  if (may_be_other && kernel != nullptr && !is_empty(product)) {
    const std::string text = words_for(product, codegen, options.regions);
    std::optional<KernelChoice> choice = find_choice(text);
    if (!choice && options.tuning.is_on) choice = measure(text, *kernel, is_own, binder);
    if (choice) is_own = choice->is_own;
  }
  return is_own ? std::move(kernel) : nullptr;
}

KernelChoice ProductStep::measure(const std::string& text, const region::Kernel& own,
                                  bool prefers_own, const Binder& binder) const {
  const RunGuard guard(binder.graph().device);
  const at::RecordFunctionGuard unseen(false);  // for profilers, which record the steps alone
  std::map<int, at::Tensor> tensors;            // by slot
  const auto tensor = [&](int slot) -> const at::Tensor& {
    at::Tensor& made = tensors[slot];
    if (!made.defined()) made = numbers_like(binder.spec(slot));
    return made;
  };
  std::vector<const void*> inputs = {tensor(slots.a).const_data_ptr(),
                                     tensor(slots.b).const_data_ptr()};
  if (slots.start >= 0) inputs.push_back(tensor(slots.start).const_data_ptr());
  void* const output = tensor(slots.result).mutable_data_ptr();
  torch::jit::Stack given;
  for (const BoundArg& arg : bind_args(binder)) {
    ORT_CHECK(arg.kind == BoundArg::Kind::kConstant || arg.kind == BoundArg::Kind::kSlot,
              "run: ", op_name(), ": an argument beside the operands is no constant");
    given.push_back(arg.kind == BoundArg::Kind::kSlot ? c10::IValue(tensor(arg.slot))
                                                      : arg.constant);
  }
  torch::jit::Stack stack;
  return find_or_measure(
      text, [&] { own.run(inputs.data(), &output); },
      [&] {
        stack = given;
        op.callBoxed(&stack);
      },
      prefers_own, binder.graph().options.tuning);
}

std::unique_ptr<BoundStep> ProductStep::bind(Binder& binder) const {
  const std::optional<region::Product> wanted = product(binder);
  std::shared_ptr<const region::Kernel> kernel;
  if (wanted) kernel = kernel_for(*wanted, binder);
  if (kernel == nullptr) {
    if (auto aligned = bind_aligned_product(*this, slots, binder)) return aligned;
    return OutStep::bind(binder);
  }
  std::vector<int> operands = {slots.a, slots.b};
  if (slots.start >= 0) operands.push_back(slots.start);
  return std::make_unique<BoundProduct>(*this, binder, std::move(operands), std::move(kernel));
}

WideProductStep::WideProductStep(const CallSite& site, const ops::ProductArgs& args)
    : FunctionalStep(site, *site.op), slots(slots_of(site, args)) {}

std::unique_ptr<BoundStep> WideProductStep::bind(Binder& binder) const {
  if (auto aligned = bind_aligned_wide_product(*this, slots, binder)) return aligned;
  return FunctionalStep::bind(binder);
}

std::unique_ptr<Step> make_product(const CallSite& site) {
  if (!site.options.products) return nullptr;
  if (const std::optional<ops::ProductArgs> wide = ops::find_wide_product(site.call)) {
    return site.op ? std::make_unique<WideProductStep>(site, *wide) : nullptr;
  }
  const std::optional<ops::ProductArgs> args = ops::find_product(site.call);
  if (!args) return nullptr;
  const ir::Type& type = site.call.outputs[0]->type;
  const region::Codegen* codegen = type.is_known() ? region::codegen_for(type.device) : nullptr;
  std::optional<OutStep> out = codegen == nullptr ? std::nullopt : find_out_step(site);
  if (!out) return nullptr;
  return std::make_unique<ProductStep>(*std::move(out), *codegen, site, *args);
}

}  // namespace torch_ort::run
