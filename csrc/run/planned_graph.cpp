#include "run/planned_graph.h"

#include "base/error.h"
#include "base/failpoint.h"
#include "run/calls.h"
#include "run/context.h"
#include "run/memory/arena.h"
#include "run/memory/delivery.h"
#include "run/replay.h"

#include <ATen/ops/alias.h>

namespace torch_ort::run {

namespace {

// Scratch memory of one half while it runs.
class ScratchLease {
 public:
  ScratchLease(Context& context, int64_t bytes) : context_(context) {
    if (bytes == 0) return;
    memory_ = allocate(context.graph().device, bytes);
    context_.attach_scratch(memory_.data());
  }
  ~ScratchLease() { context_.attach_scratch(nullptr); }

 private:
  Context& context_;
  Buffer memory_;
};

}  // namespace

PlannedGraph::PlannedGraph(std::unique_ptr<ir::Graph> graph, const Constants& constants,
                           const SessionOptions& options, const std::vector<std::string>& keep)
    : compiled_(compile_graph(std::move(graph), constants, options, keep)),
      delivery_(std::make_shared<Delivery>()) {}

PlannedGraph::Tensors PlannedGraph::run(const Tensors& inputs,
                                        const std::vector<int64_t>& symbols) {
  return run_forward_half(*begin(inputs, symbols, false));
}

std::shared_ptr<Context> PlannedGraph::begin(const Tensors& inputs,
                                             const std::vector<int64_t>& symbols, bool early,
                                             bool may_replay) {
  std::shared_ptr<Binding> binding = binding_for(inputs, symbols, early);
  std::shared_ptr<Context> context = shared_context(binding->take_context());
  const bool replays = may_replay && binding->replay != nullptr && binding->replay->lend(*context);
  if (!replays) allocate_context_memory(*context);
  for (size_t i = 0; i < inputs.size(); ++i) context->slots[compiled_->inputs[i]] = inputs[i];
  return context;
}

PlannedGraph::Tensors PlannedGraph::run_forward_half(Context& context) const {
  const Binding& binding = *context.binding;
  if (context.replays) {
    const auto end = static_cast<int>(binding.forward.size());
    binding.replay->run(context, {.is_backward = false, .begin = 0, .end = end});
    return collect_outputs(context);
  }
  ScratchLease scratch(context, binding.plan.forward_scratch_bytes);
  run_steps(context, binding.forward);
  return collect_outputs(context);
}

PlannedGraph::Tensors PlannedGraph::collect_outputs(Context& context) const {
  may_fail("results");
  Tensors results;
  results.reserve(compiled_->outputs.size() + 1);
  for (int slot : compiled_->outputs) {
    at::Tensor tensor = with_promised_strides(context.slots[slot], context.binding->specs[slot]);
    // An input that is returned must be another tensor object for autograd.
    if (compiled_->facts[slot].is_input || compiled_->facts[slot].is_constant)
      tensor = at::alias(tensor);
    results.push_back(std::move(tensor));
  }
  return results;
}

void PlannedGraph::allocate_context_memory(Context& context) const {
  const Binding& binding = *context.binding;
  if (binding.plan.chunks.empty()) return;
  may_fail("memory");
  release_dead_memory(true);
  const auto delivery = binding.gradient_return.deliver ? delivery_ : nullptr;
  for (size_t i = 0; i < binding.plan.chunks.size(); ++i) {
    Buffer memory = allocate(compiled_->device, binding.plan.chunks[i].bytes);
    context.attach_chunk(i, std::make_shared<SharedBuffer>(std::move(memory), delivery));
  }
}

void PlannedGraph::plan_like(const PlannedGraph& other) {
  const std::shared_ptr<Binding> used = other.newest_binding();
  if (!used) throw UserError("prepare_like: the other session has not run yet");
  Tensors inputs;
  for (const TensorSpec& spec : used->inputs) {
    inputs.push_back(spec.known
                         ? tensor_over(storage_without_memory(spec.bytes, spec.device), spec, 0)
                         : at::Tensor());
  }
  binding_for(inputs, used->symbol_inputs, used->gradient_return.early);
}

void PlannedGraph::free_idle_contexts() {
  std::lock_guard lock(mutex_);
  for (auto& binding : bindings_) {
    if (binding->replay) binding->replay->free_idle();
    std::lock_guard binding_lock(binding->mutex);
    binding->idle.clear();
  }
  for (const auto& step : compiled_->steps) step->free_idle_contexts();
}

std::shared_ptr<Binding> PlannedGraph::binding_for(const Tensors& inputs,
                                                   const std::vector<int64_t>& symbols,
                                                   bool early) {
  if (early) {
    std::shared_ptr<Binding> binding = find_binding(inputs, symbols, {delivery_->is_on, true});
    if (binding->num_segments > 1) return or_without_delivery(std::move(binding), inputs, symbols);
  }
  return find_binding(inputs, symbols, {delivery_->is_on, false});
}

// The binding without delivered gradients, if that one needs less memory. Delivered gradients
// occupy memory of the context until backward ends. If nobody holds them for so long, allocating
// each may need less.
std::shared_ptr<Binding> PlannedGraph::or_without_delivery(std::shared_ptr<Binding> delivering,
                                                           const Tensors& inputs,
                                                           const std::vector<int64_t>& symbols) {
  if (!delivering->gradient_return.deliver || !delivery_->is_dropped_early) return delivering;
  std::shared_ptr<Binding> other = find_binding(inputs, symbols, {false, true});
  const int64_t bytes = other->plan.peak_bytes + other->largest_segment_bytes;
  return bytes < delivering->plan.peak_bytes ? other : delivering;
}

std::shared_ptr<Binding> PlannedGraph::find_binding(const Tensors& inputs,
                                                    const std::vector<int64_t>& symbols,
                                                    GradientReturn gradient_return) {
  {
    std::lock_guard lock(mutex_);
    for (auto found = bindings_.begin(); found != bindings_.end(); ++found) {
      if (!(*found)->matches(inputs, symbols, gradient_return)) continue;
      bindings_.splice(bindings_.begin(), bindings_, found);
      return bindings_.front();
    }
  }
  std::shared_ptr<Binding> binding = make_binding(compiled_, inputs, symbols, gradient_return);
  std::lock_guard lock(mutex_);
  bindings_.push_front(binding);
  if (bindings_.size() > compiled_->options.max_bindings) bindings_.pop_back();
  return binding;
}

std::shared_ptr<Binding> PlannedGraph::newest_binding() const {
  std::lock_guard lock(mutex_);
  return bindings_.empty() ? nullptr : bindings_.front();
}

}  // namespace torch_ort::run
