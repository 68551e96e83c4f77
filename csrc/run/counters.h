// Process-wide counters: how tests and users see that the engine did the work.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

struct Counters {
  std::atomic<int64_t> graphs_compiled{0};
  std::atomic<int64_t> sessions_shared{0};  // captures that found an equal graph compiled already
  std::atomic<int64_t> plans{0};
  std::atomic<int64_t> forward_runs{0};
  std::atomic<int64_t> backward_runs{0};
  std::atomic<int64_t> steps_run{0};
  std::atomic<int64_t> steps_out{0};         // wrote into memory of the engine or of an output
  std::atomic<int64_t> results_copied{0};    // a kernel made them elsewhere than it was asked to
  std::atomic<int64_t> steps_functional{0};  // result adopted from the kernel
  std::atomic<int64_t> steps_view{0};        // views made anew in a run
  std::atomic<int64_t> steps_python{0};      // called back into Python
  std::atomic<int64_t> steps_region{0};      // fused regions
  std::atomic<int64_t> steps_product{0};     // products by kernels of the engine
  std::atomic<int64_t> products_tuned{0};    // kinds of products whose kernels have been timed
  std::atomic<int64_t> products_loaded{0};   // kinds whose kernel a file has told
  std::atomic<int64_t> nodes{0};
  std::atomic<int64_t> nodes_aten{0};
  std::atomic<int64_t> contexts_created{0};
  std::atomic<int64_t> contexts_live{0};
  std::atomic<int64_t> arena_bytes{0};  // held by the engine now, idle buffers included
  std::atomic<int64_t> arena_bytes_peak{0};
  std::atomic<int64_t> arena_growth{0};       // bytes that it asked the system for
  std::atomic<int64_t> arena_allocations{0};  // times that the engine asked the system for memory
  std::atomic<int64_t> saved_bytes{
      0};  // what crossed from forward to backward in the newest forward run
  std::atomic<int64_t> outputs_allocated{0};  // tensors given to the caller in memory of their own
  std::atomic<int64_t> gradients_delivered{0};  // in memory of the engine

  std::vector<std::pair<std::string, int64_t>> snapshot() const;
  // Zeroes what counts events; what tells a present state stays.
  void reset();
};

Counters& counters();

// What one half of a call does; added to the counters once, at its end.
struct StepCounts {
  int64_t out = 0, functional = 0, view = 0, python = 0, region = 0, product = 0;

  ~StepCounts();
};

}  // namespace torch_ort::run
