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

// Writes zeros into what lies behind the first `sizes` of a matrix.
void clear_behind(const at::Tensor& matrix, c10::IntArrayRef sizes) {
  for (int64_t dim = 0; dim < 2; ++dim) {
    const int64_t added = matrix.size(dim) - sizes[dim];
    if (added > 0) matrix.narrow(dim, sizes[dim], added).zero_();
  }
}

at::Tensor first_part(const at::Tensor& matrix, c10::IntArrayRef sizes) {
  return matrix.narrow(0, 0, sizes[0]).narrow(1, 0, sizes[1]);
}

struct BoundAlignedProduct : BoundWriter {
  const ProductStep& of;
  AlignedProduct aligned;

  BoundAlignedProduct(const ProductStep& called, Binder& binder, AlignedProduct how)
      : BoundWriter(called, binder), of(called), aligned(std::move(how)) {}

  const char* form() const override { return "aligned_product"; }

 protected:
  void write(Context& context, StepCounts& counts) const override {
    const at::Tensor a = factor(context, of.a, aligned.a), b = factor(context, of.b, aligned.b);
    const at::Tensor start = of.start < 0 ? at::Tensor() : vector(context, b.size(1));
    const at::Tensor& result = context.slots[of.outputs[0]];
    if (!aligned.result) {
      multiply(a, b, start, result);
    } else if (aligned.result->place == Widened::Place::kOwn) {
      multiply(a, b, start, with_room(context, of.outputs[0], *aligned.result));
    } else {
      multiply_by_blocks(a, b, start, result);
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

  static void multiply_by_blocks(const at::Tensor& a, const at::Tensor& b, const at::Tensor& start,
                                 const at::Tensor& result) {
    const int64_t rows = a.size(0), most = std::min(rows, kRowsOfBlock);
    const at::Tensor block = at::empty({most, b.size(1)}, a.options());
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      const at::Tensor part = block.narrow(0, 0, count);
      multiply(a.narrow(0, begin, count), b, start, part);
      result.narrow(0, begin, count).copy_(part.narrow(1, 0, result.size(1)));
    }
  }

  // A matrix in its own memory, which is larger than the tensor in the slot says.
  at::Tensor with_room(const Context& context, int slot, const Widened& widened) const {
    TensorSpec spec = context.spec(slot);
    spec.sizes = widened.sizes;
    spec.strides = widened.strides;
    spec.bytes = span_bytes(spec);
    c10::Storage storage = storage_without_memory(spec.bytes, spec.device);
    void* const data = context.slots[slot].mutable_data_ptr();
    storage.set_data_ptr_noswap(c10::DataPtr(data, spec.device));
    return tensor_over(std::move(storage), spec, 0);
  }

  at::Tensor factor(const Context& context, int slot, const std::optional<Widened>& widened) const {
    const at::Tensor& given = context.slots[slot];
    if (!widened) return given;
    at::Tensor matrix;
    if (widened->place == Widened::Place::kOwn) {
      matrix = with_room(context, slot, *widened);
    } else {
      matrix = at::empty_strided(widened->sizes, widened->strides, given.options());
      first_part(matrix, given.sizes()).copy_(given);
    }
    clear_behind(matrix, given.sizes());
    return matrix;
  }

  // The vector that is added to each row.
  at::Tensor vector(const Context& context, int64_t columns) const {
    const at::Tensor& given = context.slots[of.start];
    if (given.size(0) == columns || given.size(0) == 1) return given;
    at::Tensor longer = at::empty({columns}, given.options());
    longer.narrow(0, 0, given.size(0)).copy_(given);
    longer.narrow(0, given.size(0), columns - given.size(0)).zero_();
    return longer;
  }
};

}  // namespace

std::unique_ptr<BoundStep> bind_aligned_product(const ProductStep& step, Binder& binder) {
  const AlignedProduct* aligned = binder.aligned();
  if (aligned == nullptr) return nullptr;
  return std::make_unique<BoundAlignedProduct>(step, binder, *aligned);
}

}  // namespace torch_ort::run
