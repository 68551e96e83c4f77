#include "run/steps/word_copy.h"

#include "ops/aten_names.h"
#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/word_copy.h"

namespace torch_ort::run {

namespace {

// Copies of fewer bytes take as long as a launch.
constexpr int64_t kLeastBytes = 1 << 20;

struct BoundWordCopy : BoundWriter {
  int from, to;  // slots

  BoundWordCopy(const OutStep& of, int source, Binder& binder)
      : BoundWriter(of, binder), from(source), to(of.outputs[0]) {}

 protected:
  void write(Context& context, StepCounts& counts) const override {
    copy_in_words(context.slots[to], context.slots[from]);
    ++counts.out;
  }
};

// Dense tensors of one layout are copied as one block of memory in any case.
bool are_alike(const TensorSpec& a, const TensorSpec& b) {
  return same_strides(a.sizes, a.strides, b.strides) && is_dense(a);
}

}  // namespace

std::unique_ptr<BoundStep> bind_word_copy(const OutStep& step, Binder& binder) {
  if (step.op.operator_name().name != ops::aten::kCopy || step.outputs.size() != 1) return nullptr;
  const ArgSource& source = step.args.at(1);
  if (source.kind != ArgSource::Kind::kSlot) return nullptr;
  const TensorSpec &from = binder.spec(source.slots[0]), &to = binder.spec(step.outputs[0]);
  if (!from.known || !to.known || !to.device.is_cuda() || from.device != to.device) return nullptr;
  if (from.dtype != to.dtype || from.sizes != to.sizes || to.bytes < kLeastBytes) return nullptr;
  if (are_alike(from, to) || !has_word_copy(from, to.strides)) return nullptr;
  return std::make_unique<BoundWordCopy>(step, source.slots[0], binder);
}

}  // namespace torch_ort::run
