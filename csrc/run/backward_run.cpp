#include "run/backward_run.h"

#include "base/error.h"
#include "base/failpoint.h"
#include "run/calls.h"
#include "run/counters.h"
#include "run/guard.h"
#include "run/memory/delivery.h"
#include "run/replay.h"
#include "run/steps/collective.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

namespace torch_ort::run {

namespace {

// Returns a gradient in `memory` as a tensor of its own, whose storage holds the memory.
at::Tensor deliver(const at::Tensor& gradient, const Binding& binding, int root,
                   SharedBuffer& memory) {
  const int64_t offset = binding.plan.placements[root].offset, bytes = binding.specs[root].bytes;
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, memory.hand_out(offset, bytes),
      c10::GetAllocator(gradient.device().type()), true));
  ORT_CHECK(storage.data() == gradient.storage().data(), "run: gradient '",
            binding.graph->value(root).name, "' is not where it was planned");
  at::Tensor delivered = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), gradient.key_set(), gradient.dtype());
  delivered.unsafeGetTensorImpl()->set_sizes_and_strides(gradient.sizes(), gradient.strides(),
                                                         gradient.storage_offset());
  counters().gradients_delivered.fetch_add(1, std::memory_order_relaxed);
  return delivered;
}

std::vector<bool> which_are_defined(const Session::Tensors& tensors) {
  std::vector<bool> defined;
  for (const at::Tensor& tensor : tensors) defined.push_back(tensor.defined());
  return defined;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

Session::Tensors Session::backward(const at::Tensor& token, const Tensors& saved,
                                   const Tensors& tangents, bool keep) {
  return BackwardRun(token, saved, tangents, keep).take_all();
}

std::vector<int> Session::segments(const at::Tensor& token) {
  const std::shared_ptr<const LiveCall> call = call_of(token);
  if (call->binding->num_segments == 1) return {};
  std::vector<int> segments;
  for (int position : call->variant->gradients) {
    segments.push_back(position < 0 ? 0 : call->binding->early[position].segment);
  }
  return segments;
}

BackwardRun::BackwardRun(const at::Tensor& token, const Tensors& saved, const Tensors& tangents,
                         bool keep)
    : keep_(keep), defined_(which_are_defined(tangents)) {
  const std::shared_ptr<const LiveCall> call = call_of(token);
  constexpr const char* kSecondTime =
      "Trying to backward through the graph a second time: torch_ort has overwritten the saved "
      "values. Specify retain_graph=True in the first backward call.";
  TORCH_CHECK(call->context || call->packed, kSecondTime);
  if (call->packed && !std::exchange(keep_, false)) packed_ = token;
  const std::shared_ptr<Context> context = call->packed ? call->packed->unpack() : call->context;
  std::lock_guard lock(context->mutex);
  TORCH_CHECK(!context->spent, kSecondTime);
  called_ = context->called;
  const Session& session = *called_;
  const size_t num_saved = session.saved_inputs().size() + session.saved_outputs().size();
  const size_t num_tangents = session.compiled().tangents.size();
  ORT_CHECK(saved.size() == num_saved && tangents.size() == num_tangents, "run_backward: got ",
            saved.size(), " saved tensors and ", tangents.size(), " gradients, want ", num_saved,
            " and ", num_tangents);
  gradients_.resize(session.compiled().gradients.size());
  is_made_.assign(gradients_.size(), false);

  const RunGuard guard(session.device());
  const bool is_expected = defined_ == context->variant->key.defined;
  context_ = keep_ && is_expected ? copy_of(*context) : context;
  give(saved, is_expected ? tangents : Tensors());
  if (!is_expected) run_unexpected(*context, tangents);
}

BackwardRun::~BackwardRun() { end(); }

// Puts the tensors of the caller that the run reads into the slots of its context.
void BackwardRun::give(const Tensors& saved, const Tensors& tangents) {
  const std::optional<Tensors> saved_numbers = computed(saved), numbers = computed(tangents);
  const Tensors& read = saved_numbers ? *saved_numbers : saved;
  const Tensors& given = numbers ? *numbers : tangents;
  const CompiledGraph& graph = context_->graph();
  std::vector<int> slots;
  for (int index : graph.saved_inputs) slots.push_back(graph.inputs[index]);
  for (int index : graph.saved_outputs) slots.push_back(graph.outputs[index]);
  for (size_t i = 0; i < slots.size(); ++i) {
    context_->slots[slots[i]] = as_saved(read[i], context_->spec(slots[i]));
  }
  Tensors watched = saved;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    slots.push_back(graph.tangents.at(watched.size() - saved.size()));
    context_->slots[slots.back()] = given[i];
    watched.push_back(tangents[i]);
  }
  if (context_->binding->num_segments == 1) return;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!watched[i].defined() || watched[i].is_inference()) continue;
    watched_.push_back({watched[i], version_of(watched[i]), context_->binding->last_use[slots[i]]});
  }
}

// A copy of a context for a backward that may run again. The memory that steps overwrite is copied.
// Tensors of the caller's and of kernels are shared, since no step writes to them.
std::shared_ptr<Context> BackwardRun::copy_of(const Context& context) const {
  const Binding& binding = *context.binding;
  std::shared_ptr<Context> copy = shared_context(context.binding->take_context());
  copy->called = context.called;
  copy->variant = context.variant;
  copy->unbacked_symbols = context.unbacked_symbols;
  for (int slot : binding.kept) copy->slots[slot] = context.slots[slot];
  context.variant->graph->allocate_context_memory(*copy);
  const Session::Tensors from = context.crossing_bytes(), to = copy->crossing_bytes();
  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  return copy;
}

// Runs backward for other gradients than the plan expects. It reads what the context keeps and
// writes elsewhere.
void BackwardRun::run_unexpected(Context& context, const Tensors& tangents) {
  const RunEvent event(*called_);
  try {
    const std::optional<Tensors> numbers = computed(tangents);
    const auto half = called_->half_for(defined_, context);
    gradients_ = half->run(context, numbers ? *numbers : tangents);
  } catch (...) {
    // A saved output refers to the node of autograd that owns the token, and so the context. No
    // destructor runs, since this is part of the constructor.
    context.release_all_but_kept();
    throw;
  }
  is_made_.assign(gradients_.size(), true);
  called_->expect(defined_);
  counters().backward_runs.fetch_add(1);
  has_run_ = true;
  if (!keep_) return end();
  context.release_all_but_kept();
  context_.reset();
}

Session::Tensors BackwardRun::take(const std::vector<int>& gradients) {
  int num_steps = 0;
  for (int gradient : gradients) {
    const int position = context_ ? context_->variant->gradients[gradient] : -1;
    if (position >= 0) {
      num_steps = std::max(num_steps, context_->binding->early[position].ready);
    }
  }
  return take_after(gradients, num_steps);
}

Session::Tensors BackwardRun::take_last(const std::vector<int>& gradients) {
  return take_after(gradients, context_ ? static_cast<int>(context_->binding->backward.size()) : 0);
}

Session::Tensors BackwardRun::take_all() {
  std::vector<int> all(gradients_.size());
  std::iota(all.begin(), all.end(), 0);
  return take_last(all);
}

Session::Tensors BackwardRun::take_after(const std::vector<int>& gradients, int num_steps) {
  if (context_ && (!has_run_ || num_steps > num_done_)) advance(num_steps);
  Tensors taken;
  for (int gradient : gradients) taken.push_back(std::move(gradients_.at(gradient)));
  return taken;
}

void BackwardRun::advance(int num_steps) {
  const std::shared_ptr<Context> context = context_;
  const std::shared_ptr<Session> called = called_;
  std::lock_guard lock(context->mutex);
  const RunEvent event(*called);
  const RunGuard guard(context->graph().device);
  const Binding& binding = *context->binding;
  if (has_run_) {
    check_versions();
    look_at_what_has_left();
  }
  if (!has_run_ && !context->replays && binding.plan.backward_scratch_bytes > 0) {
    scratch_ = allocate(context->graph().device, binding.plan.backward_scratch_bytes);
    context->attach_scratch(scratch_.data());
  }
  context->spent = true;
  if (context->replays) {
    binding.replay->run(*context, {.is_backward = true, .begin = num_done_, .end = num_steps});
  } else {
    run_steps(*context, std::span(binding.backward).subspan(num_done_, num_steps - num_done_));
  }
  may_fail("gradients");
  num_done_ = num_steps;
  collect();
  if (!std::exchange(has_run_, true)) {
    called->expect(defined_);
    counters().backward_runs.fetch_add(1);
  }
  if (num_done_ < static_cast<int>(binding.backward.size())) return;
  if (num_looks_ > 0) context->variant->graph->delivery()->is_dropped_early = are_dropped_early_;
  end();
}

// Raises what autograd raises if a saved tensor was written to.
void BackwardRun::check_versions() const {
  for (const Watched& each : watched_) {
    const int64_t version = version_of(each.tensor);
    TORCH_CHECK(each.last_use <= num_done_ || version == each.version,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation while backward was running: [",
                each.tensor.toString(), " ", each.tensor.sizes(), "] is at version ", version,
                "; expected version ", each.version, " instead. A hook may write into a parameter ",
                "once the gradient of that parameter has come");
  }
}

// Notes whether the gradients of earlier segments have been dropped by now.
void BackwardRun::look_at_what_has_left() {
  const bool are_gone = std::all_of(left_.begin(), left_.end(),
                                    [](const auto& storage) { return storage.expired(); });
  are_dropped_early_ = are_gone && (num_looks_++ == 0 || are_dropped_early_);
  left_.clear();
}

// Takes the gradients that are ready. When one leaves, the context no longer holds it.
void BackwardRun::collect() {
  const Binding& binding = *context_->binding;
  const CompiledGraph& graph = context_->graph();
  std::vector<int> left;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const int position = context_->variant->gradients[i];
    if (position < 0 || is_made_[i] || binding.early[position].ready > num_done_) continue;
    const int slot = graph.gradients[position], root = binding.delivered[position];
    const at::Tensor gradient =
        root < 0 ? context_->slots[slot]
                 : deliver(context_->slots[slot], binding, root, *context_->chunks.at(0).buffer);
    gradients_[i] = with_promised_strides(gradient, binding.specs[slot]);
    is_made_[i] = true;
    left.push_back(position);
    if (binding.num_segments > 1 && gradients_[i].defined() && gradients_[i].has_storage()) {
      left_.emplace_back(gradients_[i].storage().getWeakStorageImpl());
    }
  }
  for (int position : left) {
    for (int slot : binding.early[position].slots) context_->slots[slot].reset();
  }
}

// Ends the run. The memory is free for the next call, even if the token lives on for a while.
void BackwardRun::end() noexcept {
  if (!context_) return;
  watched_.clear();
  if (!context_->in_flight.empty()) wait_for_all(*context_);
  context_->attach_scratch(nullptr);
  scratch_.give_back();
  if (!keep_ && (has_run_ || context_->spent)) {
    context_->clear();
    context_->spent = true;
    if (packed_.defined()) drop_packed(packed_);
  }
  context_.reset();
}

}  // namespace torch_ort::run
