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
  bool delivers = false;       // made while its session may deliver
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
               bool may_deliver) const;
  std::unique_ptr<Context> take_context();
};

// Raises UserError where inputs are not those of the graph, Unsupported where a step cannot take
// these sizes. `deliver`: gradients may leave in engine memory.
std::shared_ptr<Binding> make_binding(std::shared_ptr<const CompiledGraph> graph,
                                      const std::vector<at::Tensor>& inputs,
                                      const std::vector<int64_t>& symbols, bool deliver);

}  // namespace torch_ort::run
