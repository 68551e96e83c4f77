// The reports about a planned graph for explain(), dumps and tests.
#include "run/binding.h"
#include "run/planned_graph.h"
#include "run/replay.h"

#include <c10/util/accumulate.h>

#include <algorithm>

namespace torch_ort::run {

namespace {

// The steps of both halves; none without a binding.
std::vector<const BoundStep*> steps_of(const Binding* binding) {
  std::vector<const BoundStep*> steps;
  if (binding == nullptr) return steps;
  for (const BoundSteps* half : {&binding->forward, &binding->backward}) {
    for (const auto& bound : *half) steps.push_back(bound.get());
  }
  return steps;
}

int64_t element_bytes(const TensorSpec& spec) {
  if (!spec.known) return 0;
  return c10::multiply_integers(spec.sizes) * static_cast<int64_t>(c10::elementSize(spec.dtype));
}

}  // namespace

std::optional<PlannedGraph::PlanReport> PlannedGraph::plan_report() const {
  const std::shared_ptr<Binding> newest = newest_binding();
  if (newest == nullptr) return std::nullopt;
  const Binding& binding = *newest;
  PlanReport report{};
  for (const BoundSteps* half : {&binding.forward, &binding.backward}) {
    for (const auto& bound : *half) {
      if (bound->is_done) continue;
      ++(half == &binding.forward ? report.steps_forward : report.steps_backward);
      if (bound->step.writes_given_memory())
        ++report.steps_out;
      else if (bound->is_view())
        ++report.steps_view;
      else
        ++report.steps_functional;
    }
  }
  for (const plan::Placement& place : binding.plan.placements) {
    if (place.in_place_of >= 0) ++report.in_place;
  }
  report.context_bytes = binding.plan.context_bytes;
  report.scratch_bytes =
      std::max(binding.plan.forward_scratch_bytes, binding.plan.backward_scratch_bytes);
  report.saved_bytes = binding.plan.saved_bytes;
  report.peak_bytes = binding.plan.peak_bytes;
  report.segments = binding.num_segments;
  report.plan_ms = binding.plan_ms;
  return report;
}

std::optional<ReplayReport> PlannedGraph::replay_report() const {
  const std::shared_ptr<Binding> newest = newest_binding();
  if (newest == nullptr || newest->replay == nullptr) return std::nullopt;
  return newest->replay->report();
}

std::vector<std::pair<std::string, std::string>> PlannedGraph::programs_report() const {
  const std::shared_ptr<Binding> newest = newest_binding();
  std::vector<std::pair<std::string, std::string>> report;
  for (const BoundStep* bound : steps_of(newest.get())) {
    std::string program = bound->program();
    if (!program.empty()) report.emplace_back(bound->step.name, std::move(program));
  }
  return report;
}

std::vector<PlannedGraph::RowListReport> PlannedGraph::row_lists() const {
  const std::shared_ptr<Binding> newest = newest_binding();
  std::vector<RowListReport> report;
  for (const BoundStep* bound : steps_of(newest.get())) {
    const auto listed = bound->listed();
    if (listed) report.push_back({bound->step.name, listed->count, listed->num_rows});
  }
  return report;
}

std::vector<PlannedGraph::StepReport> PlannedGraph::steps_report() const {
  std::vector<StepReport> report;
  for (size_t i = 0; i < compiled_->steps.size(); ++i) {
    const Step& step = *compiled_->steps[i];
    const bool is_backward = i >= compiled_->num_forward;
    report.push_back({step.name, step.op_name(), step.form(), step.origin, is_backward});
  }
  return report;
}

std::vector<PlannedGraph::TensorReport> PlannedGraph::plan_table() const {
  static constexpr const char* kKinds[] = {"input", "constant", "planned", "output", "adopted"};
  static constexpr const char* kAreas[] = {"none", "context", "scratch"};
  const std::shared_ptr<Binding> newest = newest_binding();
  std::vector<TensorReport> table;
  if (newest == nullptr) return table;
  const Binding& binding = *newest;
  const auto name_of = [this](int slot) {
    return slot < 0 ? std::string() : compiled_->value(slot).name;
  };
  for (size_t slot = 0; slot < compiled_->facts.size(); ++slot) {
    const plan::Tensor& tensor = binding.program.tensors[slot];
    const plan::Placement& place = binding.plan.placements[slot];
    table.push_back({name_of(static_cast<int>(slot)),
                     tensor.delivered ? "delivered" : kKinds[static_cast<int>(tensor.kind)],
                     kAreas[static_cast<int>(place.area)], place.offset, tensor.bytes,
                     element_bytes(binding.specs[slot]), -1, -1, name_of(tensor.root),
                     name_of(place.in_place_of)});
  }
  for (size_t position = 0; position < binding.plan.order.size(); ++position) {
    const plan::Step& step = binding.program.steps[binding.plan.order[position]];
    for (const std::vector<int>* list : {&step.reads, &step.writes}) {
      for (int slot : *list) {
        TensorReport& report = table[slot];
        if (report.first_step < 0) report.first_step = static_cast<int>(position);
        report.last_step = static_cast<int>(position);
      }
    }
  }
  return table;
}

}  // namespace torch_ort::run
