#include "run/steps/aligned_product.h"

#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// Rows of the result that are computed at once where they are copied afterwards: enough for all
// multiprocessors of a GPU, and few enough to be still in its cache.
constexpr int64_t kRowsOfBlock = 1024;

at::Tensor first_part(const at::Tensor& matrix, c10::IntArrayRef sizes) {
  return matrix.narrow(0, 0, sizes[0]).narrow(1, 0, sizes[1]);
}

// A matrix in its own memory, which is larger than the tensor in the slot says.
at::Tensor with_room(const Context& context, int slot, const Widened& widened) {
  TensorSpec spec = context.spec(slot);
  spec.sizes = widened.sizes;
  spec.strides = widened.strides;
  spec.bytes = span_bytes(spec);
  c10::Storage storage = storage_without_memory(spec.bytes, spec.device);
  void* const data = context.slots[slot].mutable_data_ptr();
  storage.set_data_ptr_noswap(c10::DataPtr(data, spec.device));
  return tensor_over(std::move(storage), spec, 0);
}

// A factor, with zeros where its depth is greater than it was. What stands in the columns that are
// added to `b`, or in the rows that are added to `a`, reaches no number that is read.
at::Tensor factor(const Context& context, int slot, const std::optional<Widened>& widened,
                  int64_t dim_of_depth) {
  const at::Tensor& given = context.slots[slot];
  if (!widened) return given;
  at::Tensor matrix;
  if (widened->place == Widened::Place::kOwn) {
    matrix = with_room(context, slot, *widened);
  } else {
    matrix = at::empty_strided(widened->sizes, widened->strides, given.options());
    first_part(matrix, given.sizes()).copy_(given);
  }
  const int64_t depth = given.size(dim_of_depth), added = matrix.size(dim_of_depth) - depth;
  if (added > 0) matrix.narrow(dim_of_depth, depth, added).zero_();
  return matrix;
}

struct Factors {
  at::Tensor a, b;

  Factors(const Context& context, const ProductSlots& slots, const AlignedProduct& aligned)
      : a(factor(context, slots.a, aligned.a, 1)), b(factor(context, slots.b, aligned.b, 0)) {}
};

// Writes into given memory.
struct BoundAlignedProduct : BoundWriter {
  const ProductSlots& slots;
  AlignedProduct aligned;

  BoundAlignedProduct(const OutStep& of, const ProductSlots& given, Binder& binder,
                      AlignedProduct how)
      : BoundWriter(of, binder), slots(given), aligned(std::move(how)) {}

  const char* form() const override { return "aligned_product"; }

 protected:
  void write(Context& context, StepCounts& counts) const override {
    const Factors factors(context, slots, aligned);
    const at::Tensor start = added_vector(context, factors.b.size(1));
    const at::Tensor& result = context.slots[slots.result];
    if (!aligned.result) {
      multiply(factors.a, factors.b, start, result);
    } else if (aligned.result->place == Widened::Place::kOwn) {
      multiply(factors.a, factors.b, start, with_room(context, slots.result, *aligned.result));
    } else {
      multiply_by_blocks(factors, start, result);
    }
    ++counts.out;
    ++counts.aligned;
  }

 private:
  static void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& start,
                       at::Tensor result) {
    if (start.defined()) {
      at::addmm_out(result, start, a, b);
    } else {
      at::mm_out(result, a, b);
    }
  }

  static void multiply_by_blocks(const Factors& factors, const at::Tensor& start,
                                 const at::Tensor& result) {
    const int64_t rows = factors.a.size(0), most = std::min(rows, kRowsOfBlock);
    const at::Tensor block = at::empty({most, factors.b.size(1)}, result.options());
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      const at::Tensor part = block.narrow(0, 0, count);
      multiply(factors.a.narrow(0, begin, count), factors.b, start, part);
      result.narrow(0, begin, count).copy_(part.narrow(1, 0, result.size(1)));
    }
  }

  // The vector that is added to each row.
  at::Tensor added_vector(const Context& context, int64_t columns) const {
    if (slots.start < 0) return {};
    const at::Tensor& given = context.slots[slots.start];
    if (given.size(0) == columns || given.size(0) == 1) return given;
    at::Tensor longer = at::empty({columns}, given.options());
    longer.narrow(0, 0, given.size(0)).copy_(given);
    return longer;
  }
};

// Allocates its result.
struct BoundAlignedWideProduct : BoundStep {
  const ProductSlots& slots;
  AlignedProduct aligned;

  BoundAlignedWideProduct(const FunctionalStep& of, const ProductSlots& given, AlignedProduct how)
      : BoundStep(of), slots(given), aligned(std::move(how)) {}

  const char* form() const override { return "aligned_product"; }

  void run(Context& context, StepCounts& counts) const override {
    const TensorSpec& spec = context.spec(slots.result);
    const Factors factors(context, slots, aligned);
    const at::Tensor made = at::mm(factors.a, factors.b, spec.dtype);
    // Without columns to cut off, the rows that were asked for are a dense matrix.
    context.store(slots.result, first_part(made, spec.sizes).contiguous());
    ++counts.functional;
    ++counts.aligned;
  }
};

}  // namespace

std::unique_ptr<BoundStep> bind_aligned_product(const OutStep& step, const ProductSlots& slots,
                                                Binder& binder) {
  const AlignedProduct* aligned = binder.aligned();
  if (aligned == nullptr) return nullptr;
  return std::make_unique<BoundAlignedProduct>(step, slots, binder, *aligned);
}

std::unique_ptr<BoundStep> bind_aligned_wide_product(const FunctionalStep& step,
                                                     const ProductSlots& slots, Binder& binder) {
  const AlignedProduct* aligned = binder.aligned();
  if (aligned == nullptr) return nullptr;
  return std::make_unique<BoundAlignedWideProduct>(step, slots, *aligned);
}

}  // namespace torch_ort::run
