// What a form sees of the rest while it binds a step; internal to run/.
#pragma once

#include "run/binding.h"
#include "run/describe.h"

#include <vector>

namespace torch_ort::run {

// Turns a compiled graph and one set of sizes into a Binding.
class Binder {
 public:
  Binder(const CompiledGraph& graph, Binding& binding);
  void run(const std::vector<at::Tensor>& inputs);

  const CompiledGraph& graph() const { return graph_; }
  const ir::SymbolLookup& lookup() const { return lookup_; }
  const TensorSpec& spec(int slot) const { return binding_.specs[slot]; }
  plan::Kind kind_of(int slot) const { return binding_.program.tensors[slot].kind; }
  bool has_own_memory(int slot) const { return described_.roots[slot] == slot; }
  // Whether it is made in another tensor, or looks at what is.
  bool is_part(int slot) const { return described_.parts[slot].whole >= 0; }
  // Whether there is a tensor object over engine memory or a constant before the first step runs.
  bool stands_from_the_start(int slot) const;

  // Of the step that is bound now:
  int taken_over() const { return described_.taken_over[step_]; }  // an adopted slot; -1
  std::vector<plan::Workspace> workspaces() const;
  // Of a concatenation: what is not made in it, and where that is copied to. Nothing where no part
  // is made in it.
  std::optional<std::vector<ViewSpec>> rest() const;
  // Results of a step that are given to the caller, and which no earlier step has made.
  std::vector<int> take_new_outputs(const Step& step);
  // The parts that a step makes in tensors of the caller; those in engine memory have their place
  // in the binding.
  std::vector<PartSpec> take_parts(const Step& step);
  // The step's results are views that are made with each context.
  void add_static_view(const BoundView& view) { binding_.static_views.emplace(step_, &view); }

 private:
  plan::PlanOptions plan_options() const;
  void bind_steps();
  void list_slots();
  void find_early_gradients();
  void cut_into_segments();
  std::vector<PartSpec> parts_made_by(const Step& step, plan::Kind kind) const;

  const CompiledGraph& graph_;
  Binding& binding_;
  ir::SymbolLookup lookup_;
  Description described_;          // less what the binding keeps
  std::vector<bool> written_;      // by slot: an output for which memory is allocated
  int step_ = -1, position_ = -1;  // of the step that is bound, and where it stands in the order
};

}  // namespace torch_ort::run
