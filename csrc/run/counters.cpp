#include "run/counters.h"

namespace torch_ort::run {

namespace {

struct Entry {
  const char* name;
  std::atomic<int64_t> Counters::* field;
  // Whether it tells a current state, which reset() does not change.
  bool is_state;
};

constexpr Entry kEntries[] = {
    {"graphs_compiled", &Counters::graphs_compiled, false},
    {"sessions_shared", &Counters::sessions_shared, false},
    {"plans", &Counters::plans, false},
    {"forward_runs", &Counters::forward_runs, false},
    {"backward_runs", &Counters::backward_runs, false},
    {"steps_run", &Counters::steps_run, false},
    {"steps_out", &Counters::steps_out, false},
    {"results_copied", &Counters::results_copied, false},
    {"steps_functional", &Counters::steps_functional, false},
    {"collectives", &Counters::collectives, false},
    {"collectives_flight_us", &Counters::collectives_flight_us, false},
    {"collectives_waited_us", &Counters::collectives_waited_us, false},
    {"steps_view", &Counters::steps_view, false},
    {"steps_python", &Counters::steps_python, false},
    {"steps_region", &Counters::steps_region, false},
    {"steps_product", &Counters::steps_product, false},
    {"products_aligned", &Counters::products_aligned, false},
    {"products_tuned", &Counters::products_tuned, false},
    {"products_loaded", &Counters::products_loaded, false},
    {"nodes", &Counters::nodes, false},
    {"nodes_aten", &Counters::nodes_aten, false},
    {"contexts_created", &Counters::contexts_created, false},
    {"contexts_live", &Counters::contexts_live, true},
    {"arena_bytes", &Counters::arena_bytes, true},
    {"arena_bytes_peak", &Counters::arena_bytes_peak, false},
    {"arena_growth", &Counters::arena_growth, false},
    {"arena_allocations", &Counters::arena_allocations, false},
    {"saved_bytes", &Counters::saved_bytes, false},
    {"outputs_allocated", &Counters::outputs_allocated, false},
    {"gradients_delivered", &Counters::gradients_delivered, false},
    {"cuda_graphs_captured", &Counters::cuda_graphs_captured, false},
    {"cuda_graphs_replayed", &Counters::cuda_graphs_replayed, false},
};

}  // namespace

std::vector<std::pair<std::string, int64_t>> Counters::snapshot() const {
  std::vector<std::pair<std::string, int64_t>> values;
  for (const Entry& entry : kEntries) values.emplace_back(entry.name, (this->*entry.field).load());
  return values;
}

void Counters::reset() {
  for (const Entry& entry : kEntries) {
    if (!entry.is_state) (this->*entry.field).store(0);
  }
  arena_bytes_peak.store(arena_bytes.load());
}

Counters& counters() {
  static Counters instance;
  return instance;
}

int64_t& forward_runs_of_thread() {
  thread_local int64_t runs = 0;
  return runs;
}

void add_to_counters(const StepCounts& counts) {
  const auto add = [](std::atomic<int64_t>& counter, int64_t count) {
    counter.fetch_add(count, std::memory_order_relaxed);
  };
  add(counters().steps_run, counts.out + counts.functional + counts.view + counts.python +
                                counts.region + counts.product);
  add(counters().steps_out, counts.out);
  add(counters().steps_functional, counts.functional);
  add(counters().steps_view, counts.view);
  add(counters().steps_python, counts.python);
  add(counters().steps_region, counts.region);
  add(counters().steps_product, counts.product);
  add(counters().products_aligned, counts.aligned);
}

}  // namespace torch_ort::run
