// A compiled graph with all its sizes filled in, as plan/ wants it; internal to run/.
#pragma once

#include "plan/plan.h"
#include "run/binding.h"
#include "run/spec.h"

#include <unordered_map>
#include <vector>

namespace torch_ort::run {

// Where a tensor lies that is made in another one.
struct Part {
  int whole = -1;      // slot; -1: it is no part
  int root = -1;       // slot that the step makes; others are views of it
  int64_t offset = 0;  // elements
};

struct Description {
  std::vector<TensorSpec> specs;  // by slot
  std::vector<int> roots;         // by slot: whose memory it shares, for these sizes
  std::vector<int> taken_over;    // by step: the adopted slot that its result is written into; -1
  std::vector<Part> parts;        // by slot
  // By concatenation that has parts: the step, and what is copied to where in the whole.
  std::unordered_map<int, std::vector<ViewSpec>> rests;
  plan::Program program;
  std::vector<int> delivered;  // by gradient: the root slot that leaves in engine memory; -1
};

// `inputs`: of the graph, in order.
Description describe(const CompiledGraph& graph, const std::vector<TensorSpec>& inputs,
                     const ir::SymbolLookup& lookup, Leaving leaving);

}  // namespace torch_ort::run
