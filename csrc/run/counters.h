// Counters of the process, which show tests and users what the engine did.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

struct Counters {
  std::atomic<int64_t> graphs_compiled{0};
  std::atomic<int64_t> sessions_shared{0};  // captures that reused an equal compiled graph
  std::atomic<int64_t> plans{0};
  std::atomic<int64_t> forward_runs{0};
  std::atomic<int64_t> backward_runs{0};
  std::atomic<int64_t> steps_run{0};
  std::atomic<int64_t> steps_out{0};         // wrote into memory that it was given
  std::atomic<int64_t> results_copied{0};    // results that a kernel did not make in place
  std::atomic<int64_t> steps_functional{0};  // the kernel allocated the result
  std::atomic<int64_t> steps_view{0};        // views that were made in the run
  std::atomic<int64_t> steps_python{0};      // called back into Python
  std::atomic<int64_t> steps_region{0};      // fused regions
  std::atomic<int64_t> steps_product{0};     // products by kernels of the engine
  std::atomic<int64_t> products_aligned{0};  // products with columns or rows added
  std::atomic<int64_t> products_tuned{0};    // kinds of products whose kernels were timed
  std::atomic<int64_t> products_loaded{0};   // kinds whose choice was read from a file
  std::atomic<int64_t> collectives{0};       // communications between ranks that were started
  // How long they were in flight, and how much of that the engine has waited for, in microseconds.
  std::atomic<int64_t> collectives_flight_us{0};
  std::atomic<int64_t> collectives_waited_us{0};
  std::atomic<int64_t> nodes{0};
  std::atomic<int64_t> nodes_aten{0};
  std::atomic<int64_t> contexts_created{0};
  std::atomic<int64_t> contexts_live{0};
  std::atomic<int64_t> arena_bytes{0};  // held by the engine, idle buffers included
  std::atomic<int64_t> arena_bytes_peak{0};
  std::atomic<int64_t> arena_growth{0};       // bytes that the engine allocated
  std::atomic<int64_t> arena_allocations{0};  // allocations by the engine
  // What crossed from forward to backward in the newest forward run.
  std::atomic<int64_t> saved_bytes{0};
  std::atomic<int64_t> outputs_allocated{0};    // outputs with memory of their own
  std::atomic<int64_t> gradients_delivered{0};  // gradients returned in engine memory
  std::atomic<int64_t> cuda_graphs_captured{0};
  std::atomic<int64_t> cuda_graphs_replayed{0};

  std::vector<std::pair<std::string, int64_t>> snapshot() const;
  // Sets the counters of events to zero. Those of a present state, such as arena_bytes, stay.
  void reset();
};

Counters& counters();

// Forward runs that this thread has asked for. Unlike `forward_runs` it is not reset, so that a
// caller sees whether something ran between two readings, whatever other threads do.
int64_t& forward_runs_of_thread();

// The step counts of one half of a call.
struct StepCounts {
  int64_t out = 0, functional = 0, view = 0, python = 0, region = 0, product = 0;
  int64_t aligned = 0;  // of `out`
};

void add_to_counters(const StepCounts& counts);

}  // namespace torch_ort::run
