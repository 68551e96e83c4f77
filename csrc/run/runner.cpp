// Runs the steps of a binding. No allocation by the engine, no schema lookup and no Python per
// step.
#include "base/error.h"
#include "base/failpoint.h"
#include "run/call_watch.h"
#include "run/context.h"
#include "run/conv_search.h"
#include "run/counters.h"
#include "run/memory/arena.h"
#include "run/steps/collective.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_ort::run {

namespace {

void check_results(const Context& context, const Step& step) {
  for (int slot : step.outputs) {
    if (slot < 0 || !context.spec(slot).known) continue;
    check_sizes(context.graph().value(slot), context.spec(slot), context.slots[slot]);
  }
}

void run_step(Context& context, const BoundStep& bound, StepCounts& counts) {
  RECORD_FUNCTION(bound.step.name, c10::ArrayRef<const c10::IValue>{});
  bound.run(context, counts);
  const CompiledGraph& graph = context.graph();
  if (graph.options.synchronize && !graph.device.is_cpu()) {
    const c10::impl::VirtualGuardImpl device(graph.device.type());
    device.synchronizeDevice(
        (graph.device.has_index() ? graph.device : device.getDevice()).index());
  }
  if (graph.options.verify) check_results(context, bound.step);
  for (int slot : bound.release) context.slots[slot].reset();
}

// The context is not used again, and its memory is.
void fail(Context& context) {
  context.failed = true;
  context.stack.clear();
  wait_for_all(context);
}

// Adds to the counters what has run, whether or not a step throws.
struct Counting {
  StepCounts counts;
  ~Counting() { add_to_counters(counts); }
};

}  // namespace

StepCounts run_steps(Context& context, std::span<const BoundSteps::value_type> steps) {
  CallWatch::begin();
  const CompiledGraph& graph = context.graph();
  const ConvSearch search(graph.options.search_convs && graph.device.is_cuda());
  const bool is_tested = failpoint.load(std::memory_order_relaxed) != nullptr;
  Counting counting;
  for (const auto& bound : steps) {
    try {
      if (is_tested && !bound->is_done) [[unlikely]]
        may_fail(bound->form());
      if (!bound->is_done) run_step(context, *bound, counting.counts);
      for (const plan::Discard& discard : bound->discards) {
        release_pages(context.context_data() + discard.offset, discard.bytes);
      }
      for (size_t chunk : bound->dead_chunks) context.release_chunk(chunk);
    } catch (c10::Error& error) {
      const Step& step = bound->step;
      error.add_context(concat("in ", step.name,
                               step.origin.empty() ? "" : concat(", from ", step.origin),
                               ", run by torch_ort"));
      fail(context);
      throw;
    } catch (...) {
      fail(context);
      throw;
    }
  }
  context.stack.clear();
  return counting.counts;
}

}  // namespace torch_ort::run
