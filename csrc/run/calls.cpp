#include "run/calls.h"

#include "base/error.h"
#include "run/autograd/packed_call.h"
#include "run/counters.h"
#include "run/key_table.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>

namespace torch_ort::run {

namespace {

// The calls by the values of their tokens.
KeyTable<LiveCall>& live_calls() {
  // Never destroyed, because tokens may be dropped while the process ends.
  static auto* table = new KeyTable<LiveCall>;
  return *table;
}

// Returns a context to the pool, unless its session or binding is gone.
void retire(std::unique_ptr<Context> context) noexcept {
  context->clear();
  if (context->failed) return;
  const std::shared_ptr<Session> called = std::move(context->called);
  const std::shared_ptr<const Variant> variant = std::move(context->variant);
  // An idle context must not own the binding that owns it.
  std::shared_ptr<Binding> binding = std::move(context->binding);
  std::lock_guard lock(binding->mutex);
  binding->idle.push_back(std::move(context));
}

int64_t id_of(const at::Tensor& token) {
  TORCH_CHECK(token.scalar_type() == at::kLong && token.numel() == 1 && token.is_cpu(),
              "torch_ort: a saved-tensor hook gave back another tensor than it was given");
  return *token.const_data_ptr<int64_t>();
}

}  // namespace

std::shared_ptr<Context> shared_context(std::unique_ptr<Context> context) {
  return {context.release(), [](Context* used) { retire(std::unique_ptr<Context>(used)); }};
}

std::shared_ptr<const LiveCall> call_of(const at::Tensor& token) {
  const int64_t id = id_of(token);
  auto found = live_calls().find(id);
  TORCH_CHECK(
      found != nullptr, "torch_ort: the saved state of forward call ", id,
      " is gone: its token was copied by a hook that was not active during the forward call, ",
      "or its graph was freed");
  return found;
}

at::Tensor make_token(std::shared_ptr<Context> context, bool packs) {
  LiveCall call{.variant = context->variant, .binding = context->binding};
  if (packs) {
    call.packed = std::make_shared<const PackedCall>(*context);
  } else {
    call.context = std::move(context);
  }
  auto* value = new int64_t(live_calls().add(std::move(call)));
  counters().contexts_live.fetch_add(1);
  return at::from_blob(
      value, {1},
      [](void* data) {
        const std::unique_ptr<int64_t> token(static_cast<int64_t*>(data));
        live_calls().remove(*token);
        counters().contexts_live.fetch_sub(1);
      },
      at::TensorOptions().dtype(at::kLong));
}

void drop_packed(const at::Tensor& token) {
  live_calls().change(id_of(token), [](LiveCall& call) { call.packed.reset(); });
}

bool is_live(int64_t token) { return live_calls().find(token) != nullptr; }

void keep_beside(const at::Tensor& token, std::shared_ptr<Companion> companion) {
  live_calls().change(id_of(token), [&](LiveCall& call) { call.companion = std::move(companion); });
}

std::shared_ptr<Companion> kept_beside(const at::Tensor& token) {
  return call_of(token)->companion;
}

at::Tensor as_saved(const at::Tensor& tensor, const TensorSpec& spec) {
  if (!spec.known || !tensor.defined() || tensor.is_sparse()) return tensor;
  if (tensor.sizes() == c10::IntArrayRef(spec.sizes) && tensor.scalar_type() == spec.dtype &&
      tensor.device() == spec.device) {
    return with_promised_strides(tensor, spec);
  }
  throw UserError(concat("saved-tensor hooks: got ", tensor.scalar_type(), tensor.sizes(), " on ",
                         tensor.device(), " from a hook that unpacks, want ", spec.dtype,
                         c10::IntArrayRef(spec.sizes), " on ", spec.device, ", as was packed"));
}

at::Tensor with_promised_strides(const at::Tensor& tensor, const TensorSpec& spec) {
  if (!spec.known || !tensor.defined() || tensor.is_sparse()) return tensor;
  if (tensor.strides() == c10::IntArrayRef(spec.strides) || tensor.numel() == 0) return tensor;
  const bool same = tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
                    same_strides(spec.sizes, tensor.strides(), spec.strides);
  if (same) return tensor;
  if (may_overlap(spec)) {
    throw UserError(concat("run: a result of sizes ", c10::IntArrayRef(spec.sizes),
                           " with strides ", tensor.strides(), ": got the type's strides ",
                           c10::IntArrayRef(spec.strides), ", want a place for each element"));
  }
  at::Tensor copy = make_tensor(spec);
  copy.copy_(tensor);
  return copy;
}

RunEvent::RunEvent(const Session& session) {
  if (event_.isActive()) event_.before("torch_ort::session " + std::to_string(session.id()));
}

}  // namespace torch_ort::run
