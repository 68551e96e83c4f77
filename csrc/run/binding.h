// A compiled graph for one set of sizes: the plan, and the steps ready to run; internal to run/.
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

class Replay;

// A slot that is a part of another tensor.
struct PartSpec {
  ViewSpec place;
  int whole = -1;
};

using BoundSteps = std::vector<std::unique_ptr<const BoundStep>>;

// How gradients are returned to the caller.
struct GradientReturn {
  bool deliver = false;  // they may be in engine memory
  bool early = false;    // each is returned as soon as it is ready

  bool operator==(const GradientReturn&) const = default;
};

// When a gradient may be returned, if gradients leave early.
struct EarlyGradient {
  // How many steps of the backward half have to run first. The caller may write into the gradient
  // and into its parameter, so no later step reads either of them.
  int ready = 0;
  int segment = 0;
  std::vector<int> slots;  // slots to release when it has been returned
};

struct Binding : std::enable_shared_from_this<Binding> {
  std::shared_ptr<const CompiledGraph> graph;
  std::vector<std::pair<std::string, int64_t>> symbols;
  std::vector<TensorSpec> inputs;  // compared with the inputs of later calls
  std::vector<int64_t> symbol_inputs;
  std::vector<TensorSpec> specs;  // by slot
  plan::Program program;
  plan::Plan plan;
  double plan_ms = 0;
  // By gradient: the slot whose memory is handed out with it; -1: it has memory of its own.
  std::vector<int> delivered;
  GradientReturn gradient_return;
  // By slot: how many steps of the backward half have run when its memory is not used any more.
  std::vector<int> last_use;
  std::vector<EarlyGradient> early;  // by gradient
  int num_segments = 1;              // of the backward half; 1 if gradients do not leave early
  int64_t largest_segment_bytes = 0;
  BoundSteps forward, backward;
  std::map<int, const BoundStep*> static_results;  // by step; made with each context
  std::vector<int> owned;                          // slots with an offset in engine memory
  std::vector<PartSpec> parts;                     // slots that are parts of these
  std::vector<int> transient;                      // slots that each call fills
  std::vector<const ViewSpec*> moving_views;
  // What the engine keeps for backward: slots of `transient`, and slots of `owned` whose memory
  // holds what crosses the border.
  std::vector<int> kept, crossing;
  std::unique_ptr<Replay> replay;  // nullptr: not asked for

  std::mutex mutex;
  std::vector<std::unique_ptr<Context>> idle;

  ~Binding();
  bool matches(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& symbol_values,
               GradientReturn gradient_return) const;
  std::unique_ptr<Context> take_context();
};

// Throws UserError if the inputs are not those of the graph, and Unsupported if a step cannot run
// with these sizes.
std::shared_ptr<Binding> make_binding(std::shared_ptr<const CompiledGraph> graph,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::vector<int64_t>& symbols,
                                      GradientReturn gradient_return);

}  // namespace torch_ort::run
