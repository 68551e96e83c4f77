// A graph as steps over slots: all that a session knows before it sees a size. The planner and the
// binder read it, and nothing changes it once it is made.
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

// Tensors of initializers that hold no data of their own, by name.
using Constants = std::unordered_map<std::string, at::Tensor>;

// What a slot is, whatever the sizes.
struct SlotFacts {
  const ir::Value* value = nullptr;
  int root = -1;      // the slot whose memory it shares; itself if none
  int producer = -1;  // step
  // Size known only when its step has run, or on another device than the program's.
  bool unbacked = false;
  bool leaves = false;    // its memory is given to the caller
  bool is_input = false;  // graph input, or gradient of an output
  bool is_constant = false;
  bool crosses = false;  // written or given in forward, read in backward
};

struct CompiledGraph {
  std::unique_ptr<const ir::Graph> graph;
  SessionOptions options;
  const ir::Node* yield = nullptr;      // the border between the halves; nullptr: there is but one
  c10::Device device{c10::kCPU};        // that the program runs on
  std::set<std::string> bound_symbols;  // known when a call begins

  Slots slot_of;
  std::vector<SlotFacts> facts;  // by slot
  std::vector<std::unique_ptr<const Step>> steps;
  size_t num_forward = 0;  // steps before the border
  bool has_unbacked_values = false;

  std::vector<int> inputs, tangents, outputs, gradients;  // slots
  std::vector<std::pair<int, at::Tensor>> constants;      // slot, tensor
  std::vector<int> mutated_inputs;  // indices of inputs whose version counters are bumped
  // Inputs, and forward outputs, that backward reads: autograd saves them, not the engine. Indices.
  std::vector<int> saved_inputs, saved_outputs;

  ops::CallList calls;  // owns the values of slots that stand in no graph

  const ir::Value& value(int slot) const { return *facts[slot].value; }
  // Size known only in the run, or memory on another device than the program's.
  bool is_unbacked(const ir::Value& value) const;
  bool is_saved_output(int slot) const;
  Constants constants_by_name() const;
};

// Takes the graph. Raises Unsupported if an operator is missing, UserError if a constant is.
std::shared_ptr<const CompiledGraph> compile_graph(std::unique_ptr<ir::Graph> graph,
                                                   const Constants& constants,
                                                   const SessionOptions& options);

}  // namespace torch_ort::run
