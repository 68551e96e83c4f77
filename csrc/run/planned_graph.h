// A compiled graph with its plans.
//
// CompiledGraph  does not depend on sizes: the steps, and which tensors cross from forward to
//               backward
// Binding        one set of sizes: the plan, and the arguments that depend on sizes. Bindings are
//               cached; the least recently used one is dropped.
// Context        the tensors of one forward call and its backward. Contexts are pooled.
// PlannedGraph   a compiled graph with its bindings
// Session        a training graph with its variants, each a planned graph; the calls of it
#pragma once

#include "run/compiled_graph.h"
#include "run/replay_report.h"

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

struct Binding;
struct Context;
struct Delivery;
struct GradientReturn;

class PlannedGraph {
 public:
  using Tensors = std::vector<at::Tensor>;  // an undefined tensor is None

  // Compiles a graph; see compile_graph.
  PlannedGraph(std::unique_ptr<ir::Graph> graph, const Constants& constants,
               const SessionOptions& options, const std::vector<std::string>& keep = {});

  const CompiledGraph& compiled() const { return *compiled_; }
  const std::shared_ptr<Delivery>& delivery() const { return delivery_; }

  // Runs a graph without a border as part of a call, in the thread state that the call has set.
  // `symbols` are the values of its symbol inputs.
  Tensors run(const Tensors& inputs, const std::vector<int64_t>& symbols);
  // The two parts of run(), between which a call says what it is. With `early` gradients are to be
  // returned as they become ready; they are returned together nevertheless if they have few bytes.
  // With `may_replay` the context may run as CUDA graphs, of which each call has all memory.
  std::shared_ptr<Context> begin(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                 bool early, bool may_replay = false);
  Tensors run_forward_half(Context& context) const;

  // Gives a context of one of the bindings the memory that its plan asks for.
  void allocate_context_memory(Context& context) const;
  // Makes the plan for the sizes with which another graph of the same inputs ran last, without
  // running. Throws what begin() would throw, and UserError if the other one has not run.
  void plan_like(const PlannedGraph& other);
  void free_idle_contexts();

  // A report of the plan that was used last, for explain(); nothing before the first.
  struct PlanReport {
    int64_t steps_forward, steps_backward, steps_out, steps_functional, steps_view, in_place;
    int64_t context_bytes, scratch_bytes, saved_bytes, peak_bytes;
    int64_t segments;  // segments of the backward half; 1 unless gradients leave early
    double plan_ms;
  };
  std::optional<PlanReport> plan_report() const;
  struct StepReport {
    std::string name, op, form, origin;
    bool backward;
  };
  std::vector<StepReport> steps_report() const;
  // The place of each tensor in the plan that was used last; empty before the first.
  struct TensorReport {
    std::string name, kind, area;
    int64_t offset, bytes;  // gaps between elements included
    int64_t element_bytes;
    int first_step, last_step;        // positions in execution order; -1: unused
    std::string shares, in_place_of;  // names of tensors; empty: none
  };
  std::vector<TensorReport> plan_table() const;
  // What of the plan that was used last runs as CUDA graphs; nothing if none are asked for, or
  // before the first run.
  std::optional<ReplayReport> replay_report() const;
  // The kernels of regions in the plan that was used last: name of the node, listing.
  std::vector<std::pair<std::string, std::string>> programs_report() const;
  // The lists of rows that the last run with that plan made: name of the node, the number of rows
  // in the list, and the number of rows in all.
  struct RowListReport {
    std::string name;
    int64_t count, num_rows;
  };
  std::vector<RowListReport> row_lists() const;

 private:
  Tensors collect_outputs(Context& context) const;
  std::shared_ptr<Binding> binding_for(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                       bool early);
  std::shared_ptr<Binding> or_without_delivery(std::shared_ptr<Binding> delivering,
                                               const Tensors& inputs,
                                               const std::vector<int64_t>& symbols);
  std::shared_ptr<Binding> find_binding(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                        GradientReturn gradient_return);
  std::shared_ptr<Binding> newest_binding() const;  // nullptr before the first run

  std::shared_ptr<const CompiledGraph> compiled_;
  std::shared_ptr<Delivery> delivery_;

  mutable std::mutex mutex_;                      // guards the following member
  std::list<std::shared_ptr<Binding>> bindings_;  // most recently used first
};

}  // namespace torch_ort::run
