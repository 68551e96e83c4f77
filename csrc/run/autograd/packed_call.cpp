#include "run/autograd/packed_call.h"

#include "run/autograd/python_op.h"
#include "run/calls.h"
#include "run/guard.h"

namespace torch_ort::run {

namespace {

// Engine memory serves other calls once the context has been released.
at::Tensor with_own_memory(const at::Tensor& tensor) {
  const bool is_of_engine =
      tensor.has_storage() && tensor.storage().data_ptr().get_context() == nullptr;
  return is_of_engine ? tensor.clone() : tensor;
}

}  // namespace

// No dispatch state of a run surrounds the calls of hooks, which are the user's code.
PackedCall::PackedCall(const Context& context)
    : called_(context.called),
      variant_(context.variant),
      binding_(context.binding),
      unbacked_symbols_(context.unbacked_symbols) {
  for (int slot : binding_->crossing) pack(slot, context.slots[slot]);
  for (int slot : binding_->kept) {
    const at::Tensor& tensor = context.slots[slot];
    if (is_python_context(tensor)) {
      python_contexts_.emplace_back(slot, tensor);
    } else {
      pack(slot, tensor);
    }
  }
}

void PackedCall::pack(int slot, const at::Tensor& tensor) {
  const at::Tensor packed = [&] {
    const RunGuard guard(binding_->graph->device);
    return with_own_memory(tensor);
  }();
  items_.push_back(
      {slot, spec_of(tensor), torch::autograd::SavedVariable(packed, /*is_output=*/false)});
}

std::shared_ptr<Context> PackedCall::unpack() const {
  std::shared_ptr<Context> context = shared_context(binding_->take_context());
  context->called = called_;
  context->variant = variant_;
  context->unbacked_symbols = unbacked_symbols_;
  for (const auto& [slot, tensor] : python_contexts_) context->slots[slot] = tensor;
  {
    const RunGuard guard(binding_->graph->device);
    variant_->graph->allocate_context_memory(*context);
  }
  for (const auto& [slot, spec, saved] : items_) {
    const at::Tensor tensor = saved.unpack();
    const RunGuard guard(binding_->graph->device);
    at::Tensor& place = context->slots[slot];
    if (place.defined()) {
      place.copy_(as_saved(tensor, spec));
    } else {
      place = as_saved(tensor, spec);
    }
  }
  return context;
}

}  // namespace torch_ort::run
