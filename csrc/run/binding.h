// A compiled graph over one set of sizes: the plan, and the steps ready to run; internal to run/.
#pragma once

#include "plan/plan.h"
#include "run/compiled_graph.h"
#include "run/spec.h"
#include "run/step.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

struct BoundView;

// A part of another tensor, and what looks at all of that part.
struct PartSpec {
  ViewSpec place;
  int whole = -1;
};

using BoundSteps = std::vector<std::unique_ptr<const BoundStep>>;

// What becomes of gradients.
struct Leaving {
  bool deliver = false;  // they may leave in engine memory
  bool early = false;    // each leaves as soon as it is ready

  bool operator==(const Leaving&) const = default;
};

// When a gradient may leave, where they leave early.
struct EarlyGradient {
  // Steps of the backward half that must have run. Whoever gets the gradient may write into it, and
  // into the parameter that it is of, so nothing reads either after these.
  int ready = 0;
  int segment = 0;
  std::vector<int> slots;  // to let go when it has left
};

struct Binding : std::enable_shared_from_this<Binding> {
  std::shared_ptr<const CompiledGraph> graph;
  std::vector<std::pair<std::string, int64_t>> symbols;
  std::vector<TensorSpec> inputs;  // to recognise the sizes again
  std::vector<int64_t> symbol_inputs;
  std::vector<TensorSpec> specs;  // by slot
  plan::Program program;
  plan::Plan plan;
  double plan_ms = 0;
  std::vector<int> delivered;  // by gradient: the slot whose memory leaves; -1: see Describer
  Leaving leaving;
  // By slot: how many steps of the backward half have run when the slot's memory is used no more.
  std::vector<int> last_use;
  std::vector<EarlyGradient> early;  // by gradient
  int num_segments = 1;              // of the backward half; 1 where gradients do not leave early
  int64_t largest_segment_bytes = 0;
  BoundSteps forward, backward;
  std::map<int, const BoundView*> static_views;  // by step; made with the context
  std::vector<int> owned;                        // slots with a place of their own in engine memory
  std::vector<PartSpec> parts;                   // of these
  std::vector<int> transient;                    // slots that are filled anew in each call
  std::vector<const ViewSpec*> moving_views;
  std::vector<int> kept;  // of `transient`, what the engine keeps for backward
  int64_t serial = 0;     // tells bindings apart

  std::mutex mutex;
  std::vector<std::unique_ptr<Context>> idle;

  ~Binding();
  bool matches(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& symbol_values,
               Leaving leaving) const;
  std::unique_ptr<Context> take_context();
};

// Raises UserError where inputs are not those of the graph, Unsupported where a step cannot take
// these sizes.
std::shared_ptr<Binding> make_binding(std::shared_ptr<const CompiledGraph> graph,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::vector<int64_t>& symbols, Leaving leaving);

}  // namespace torch_ort::run
