// What the form of a step can ask while the step is bound; internal to run/.
#pragma once

#include "run/binding.h"
#include "run/describe.h"

#include <vector>

namespace torch_ort::run {

// Makes the Binding of a compiled graph for one set of sizes.
class Binder {
 public:
  Binder(const CompiledGraph& graph, Binding& binding);
  void run(const std::vector<at::Tensor>& inputs);

  const CompiledGraph& graph() const { return graph_; }
  const ir::SymbolLookup& lookup() const { return lookup_; }
  const TensorSpec& spec(int slot) const { return binding_.specs[slot]; }
  const std::vector<TensorSpec>& specs() const { return binding_.specs; }  // by slot
  plan::Kind kind_of(int slot) const { return binding_.program.tensors[slot].kind; }
  bool has_own_memory(int slot) const { return described_.roots[slot] == slot; }
  // Whether the slot is written as a part of another tensor, or is a view of such a part.
  bool is_part(int slot) const { return described_.parts[slot].whole >= 0; }
  // Whether the slot has a tensor object before the first step runs: one over engine memory, or a
  // constant.
  bool stands_from_the_start(int slot) const;

  // The following are about the step that is being bound.
  int taken_over() const {
    return described_.taken_over[step_];
  }  // the adopted slot that it overwrites, or -1
  std::vector<plan::Workspace> workspaces() const;
  // For a concatenation: the operands that still have to be copied, and where to. Nothing if no
  // operand is written in place as a part.
  std::optional<std::vector<ViewSpec>> rest() const;
  // For a product: how it is computed with more columns. nullptr: with those that it has.
  const AlignedProduct* aligned() const;
  // The results of a step that are returned to the caller in memory of their own, for which no
  // earlier step has asked: the step has to allocate them.
  std::vector<int> take_new_outputs(const Step& step);
  // The parts that a step writes in tensors of the caller. The addresses of parts in engine memory
  // are in the binding.
  std::vector<PartSpec> take_parts(const Step& step);
  // Registers the results of the step as tensors that are made with each context.
  void add_static(const BoundStep& step) { binding_.static_results.emplace(step_, &step); }

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
  Description described_;          // without what was moved to the binding
  std::vector<bool> written_;      // by slot: whether memory was allocated for the output
  int step_ = -1, position_ = -1;  // the step that is being bound, and its position in the order
};

}  // namespace torch_ort::run
