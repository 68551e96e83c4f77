#include "run/steps/writer.h"

#include "run/binder.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/memory/spoil.h"

namespace torch_ort::run {

BoundWriter::BoundWriter(const Step& of, Binder& binder)
    : BoundStep(of), allocate(binder.take_new_outputs(of)), takes_over(binder.taken_over()) {
  if (of.writes_strided_memory()) parts = binder.take_parts(of);
}

std::vector<const ViewSpec*> BoundWriter::moving_views() const {
  std::vector<const ViewSpec*> views;
  for (const PartSpec& part : parts) views.push_back(&part.place);
  return views;
}

void BoundWriter::run(Context& context, StepCounts& counts) const {
  for (int slot : allocate) {
    context.slots[slot] = make_tensor(context.spec(slot));
    counters().outputs_allocated.fetch_add(1, std::memory_order_relaxed);
  }
  for (const PartSpec& part : parts) {
    context.point(part.place, context.slots[part.whole].storage(), part.place.offset);
  }
  if (takes_over >= 0) context.slots[step.outputs[0]] = context.slots[takes_over];
  if (context.graph().options.spoil) spoil_results(context, step);
  write(context, counts);
}

}  // namespace torch_ort::run
