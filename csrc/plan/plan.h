// Where each tensor of a program lives, step by step. Plain numbers: no graph, no tensors, no
// symbols.
//
// A run has two halves: the forward steps, and later (or never, or twice) the backward steps.
// Engine memory is in two areas. The *context* area lives from the forward call to the end of the
// backward one and holds what crosses; the *scratch* area is lent to one half while it runs. A
// gradient may be *delivered* in the context area: it takes over what has crossed and is dead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::plan {

enum class Kind : uint8_t {
  kInput,     // memory of the caller: read only, unless a step with an effect names it
  kConstant,  // memory that the session keeps
  kPlanned,   // memory of the engine: gets an offset
  kOutput,    // memory of its own, given to the caller
  kAdopted,   // memory that the kernel made; kept until the last use
};

// One tensor. An alias shares the memory of its root, which is no alias itself.
struct Tensor {
  Kind kind = Kind::kPlanned;
  int64_t bytes = 0;  // of the memory it needs from its own first byte on; ignored for an alias
  int root = -1;      // -1: itself
  // Planned, and leaves with the backward call where it lies: nothing may overwrite it any more.
  bool delivered = false;
};

// One kernel call. Indices into Program::tensors.
struct Step {
  std::vector<int> reads;
  std::vector<int> writes;  // made here; an alias made here (a view) is listed too
  // Reads that writes[0] may overwrite: same layout, element by element. In order of preference.
  std::vector<int> in_place;
  bool effect = false;     // keeps its place among the steps with an effect
  bool workspace = false;  // the kernel can use memory for itself
  // How much of that it takes, about; -1: it copies all that it reads and writes.
  int64_t workspace_bytes = -1;
};

struct Program {
  std::vector<Tensor> tensors;
  std::vector<Step> steps;
  int num_forward = 0;         // steps before the border
  std::vector<int> outputs;    // tensors that leave with the forward call, inputs among them
  std::vector<int> gradients;  // tensors that leave with the backward call
  // They leave as soon as they are ready. Their memory is the caller's from then on, and no reason
  // to make them late.
  bool gradients_leave_early = false;
};

enum class Area : uint8_t { kNone, kContext, kScratch };

struct Placement {
  Area area = Area::kNone;
  int64_t offset = 0;    // bytes
  int in_place_of = -1;  // the read of its step whose memory it takes over
};

// A part of the context area that is dead after the step at a position of the order.
struct Discard {
  int position;
  int64_t offset, bytes;
};

// A part of an area that is dead while the step at a position of the order runs.
struct Workspace {
  int position = 0;
  Area area = Area::kNone;
  int64_t offset = 0, bytes = 0;
};

struct Plan {
  std::vector<int> order;             // steps in execution order; forward ones first
  std::vector<Placement> placements;  // by tensor; an alias has that of its root
  // Adopted tensors (and aliases of adopted ones) to let go after the step at each position of
  // `order`.
  std::vector<std::vector<int>> release;
  // In the backward half, where kernels make large tensors of their own: these may not find room in
  // what is dead of the context area, which then goes back to the system for them.
  std::vector<Discard> discards;
  std::vector<Workspace> workspaces;  // by position
  std::vector<int> crossing;          // roots that cross the border: planned and adopted ones
  int64_t context_bytes = 0;
  int64_t crossing_bytes = 0;  // its beginning, where what crosses lies; the rest is dead then
  int64_t forward_scratch_bytes = 0;
  int64_t backward_scratch_bytes = 0;
  int64_t saved_bytes =
      0;  // of what crosses, adopted and planned together, inputs and outputs not counted
  int64_t peak_bytes = 0;  // context plus the larger scratch
};

struct PlanOptions {
  bool reorder = true;
  bool in_place = true;
  int64_t alignment = 64;
  int64_t discard_bytes = 256 << 10;   // the smallest part that is worth a call to the system
  int64_t workspace_bytes = 16 << 10;  // the smallest part that serves a kernel
};

Plan make_plan(const Program& program, const PlanOptions& options);

// Order of the steps that lowers the peak of planned and adopted memory; the given one if none is
// found. Forward and backward steps stay apart, effects keep their order.
std::vector<int> choose_order(const Program& program);

// Recomputes everything that must hold from the lifetimes alone, with no code of the planner.
// Raises InternalError: overlap of live memory, alias rules, effect order, reads before writes,
// in-place over something that is still read, an input, an output, or a tensor that leaves; release
// too early; workspaces and discards of what lives.
void verify_plan(const Program& program, const Plan& plan, const PlanOptions& options);

}  // namespace torch_ort::plan
