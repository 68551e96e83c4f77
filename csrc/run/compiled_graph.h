// A graph compiled to steps over slots: all that a session knows before it sees sizes. The planner
// and the binder read it; it never changes after it is made.
#pragma once

#include "ops/call.h"
#include "run/options.h"
#include "run/step.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ort::run {

// The tensors of initializers without data, by name.
using Constants = std::unordered_map<std::string, at::Tensor>;

// Facts about a slot that do not depend on sizes.
struct SlotFacts {
  const ir::Value* value = nullptr;
  int root = -1;      // the slot whose memory it shares, or itself
  int producer = -1;  // the step that makes it; -1: none
  // The tensor cannot be planned before the run: a size of it is unbacked. Tensors on another
  // device than the program's are treated in the same way.
  bool unbacked = false;
  bool leaves = false;    // its memory is returned to the caller
  bool is_input = false;  // a graph input, or the gradient of an output
  bool is_constant = false;
  bool crosses = false;  // written or passed in forward, and read in backward
};

struct CompiledGraph {
  std::unique_ptr<const ir::Graph> graph;
  SessionOptions options;
  const ir::Node* yield = nullptr;      // the border between the halves; nullptr: only one half
  c10::Device device{c10::kCPU};        // on which the program runs
  std::set<std::string> bound_symbols;  // whose values are known when a call begins

  Slots slot_of;
  std::vector<SlotFacts> facts;  // by slot
  std::vector<std::unique_ptr<const Step>> steps;
  size_t num_forward = 0;  // steps before the border
  bool has_unbacked_values = false;

  std::vector<int> inputs, tangents, outputs, gradients;  // slots
  std::vector<std::pair<int, at::Tensor>> constants;      // slot and tensor
  // Indices of the inputs whose version counters a call increments.
  std::vector<int> mutated_inputs;
  // Indices of the inputs, and of the forward outputs, that backward reads. Autograd saves these,
  // not the engine.
  std::vector<int> saved_inputs, saved_outputs;

  ops::CallList calls;  // owns the temporaries of the calls

  const ir::Value& value(int slot) const { return *facts[slot].value; }
  // Whether the value cannot be planned; see SlotFacts::unbacked.
  bool is_unbacked(const ir::Value& value) const;
  bool is_saved_output(int slot) const;
  Constants constants_by_name() const;
};

// Compiles a graph and takes ownership of it. `keep` names values of the forward half that have to
// exist when backward begins, whether it reads them or not. Throws Unsupported if an operator is
// not registered, and UserError if a constant is missing.
std::shared_ptr<const CompiledGraph> compile_graph(std::unique_ptr<ir::Graph> graph,
                                                   const Constants& constants,
                                                   const SessionOptions& options,
                                                   const std::vector<std::string>& keep = {});

}  // namespace torch_ort::run
