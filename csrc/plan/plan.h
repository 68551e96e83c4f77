// The memory plan: where each tensor of a program is in memory, step by step. It works on plain
// numbers and knows no graph, no tensors and no symbols.
//
// A run has two halves: the forward steps and, later, the backward steps, which may run once, never
// or several times. Engine memory has two areas. The *context* area lives from the forward call to
// the end of the backward call and holds what crosses the border between the halves. The *scratch*
// area is allocated for one half while it runs. A gradient may be *delivered* in the context area:
// it takes memory of crossing tensors that are dead by then.
//
// The context area may consist of *chunks*, each of them allocated on its own. A chunk is freed in
// the backward half as soon as nothing in it is needed, so that memory which is allocated there, as
// that of gradients, can be the memory of dead activations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::plan {

enum class Kind : uint8_t {
  // Memory of the caller. Only a step with an effect may write into it.
  kInput,
  kConstant,  // memory that the session owns
  kPlanned,   // memory of the engine, with an offset
  kOutput,    // allocated on its own and given to the caller
  kAdopted,   // allocated by the kernel; held until its last use
};

// One tensor. An alias shares the memory of its root, which is not an alias itself.
struct Tensor {
  Kind kind = Kind::kPlanned;
  int64_t bytes = 0;  // from its first byte to its last; ignored for an alias
  int root = -1;      // -1: it is its own root
  // It is planned and given to the caller at the end of backward where it is, so nothing may
  // overwrite it.
  bool delivered = false;
};

// One kernel call. Indices into Program::tensors.
struct Step {
  std::vector<int> reads;
  std::vector<int> writes;  // including aliases (views) that are made here
  // The reads that writes[0] may overwrite, element by element in the same layout, in order of
  // preference.
  std::vector<int> in_place;
  bool effect = false;     // steps with an effect stay in order
  bool workspace = false;  // the kernel can use a workspace
  // The approximate size of the workspace; -1: that of all that the step reads and writes.
  int64_t workspace_bytes = -1;
};

struct Program {
  std::vector<Tensor> tensors;
  std::vector<Step> steps;
  int num_forward = 0;  // the steps before the border
  // The tensors that the forward call returns, which may be inputs.
  std::vector<int> outputs;
  std::vector<int> gradients;  // the tensors that the backward call returns
  // Gradients are returned as soon as they are ready. Their memory belongs to the caller from then
  // on, so the order of steps does not delay them to save memory.
  bool gradients_leave_early = false;
  // The order of a half, forward or backward, has a reason beside memory, and is kept.
  bool keeps_forward_order = false, keeps_backward_order = false;
};

enum class Area : uint8_t { kNone, kContext, kScratch };

struct Placement {
  Area area = Area::kNone;
  int64_t offset = 0;    // bytes
  int in_place_of = -1;  // the read of its step that it overwrites; -1: none
};

// A part of the context area that is dead after the step at `position` of the order.
struct Discard {
  int position;
  int64_t offset, bytes;
};

// A piece of the context area that is allocated on its own.
struct Chunk {
  int64_t offset, bytes;
  // It is dead after the step at this position of the order, in the backward half. The number of
  // steps: not before the context ends.
  int position;
};

// A part of an area that is dead while the step at `position` of the order runs.
struct Workspace {
  int position = 0;
  Area area = Area::kNone;
  int64_t offset = 0, bytes = 0;
};

struct Plan {
  std::vector<int> order;             // the steps in execution order, forward first
  std::vector<Placement> placements;  // by tensor; that of its root for an alias
  // By position of `order`: the adopted tensors, and aliases of adopted tensors, to release after
  // the step.
  std::vector<std::vector<int>> release;
  // Parts of the context area to return to the system in the backward half, for large tensors that
  // kernels allocate themselves.
  std::vector<Discard> discards;
  std::vector<Workspace> workspaces;  // by position
  // What the context area consists of, in order; no tensor lies in two of them.
  std::vector<Chunk> chunks;
  // The planned and adopted roots that cross the border.
  std::vector<int> crossing;
  int64_t context_bytes = 0;
  // The beginning of the context area, which holds what crosses. The rest is dead at the border.
  int64_t crossing_bytes = 0;
  int64_t forward_scratch_bytes = 0;
  int64_t backward_scratch_bytes = 0;
  // Of all that crosses, planned and adopted, without inputs and outputs.
  int64_t saved_bytes = 0;
  int64_t peak_bytes = 0;  // the context area and the larger scratch area
};

struct PlanOptions {
  bool reorder = true;
  bool in_place = true;
  int64_t alignment = 64;
  int64_t discard_bytes = 256 << 10;  // the smallest part that is worth a system call
  // By how much discards have to lower the peak: the system clears the memory when it is used
  // again, in each call, which takes about as long as to read and write it twice.
  int64_t discard_gain = 32 << 20;
  int64_t workspace_bytes = 16 << 10;  // the smallest part that is of use to a kernel
  // The smallest chunk of the context area. 0: the area is one chunk. An area of several chunks has
  // no discards and no workspaces.
  int64_t chunk_bytes = 0;
};

Plan make_plan(const Program& program, const PlanOptions& options);

// Returns an order of the steps with a lower peak of planned and adopted memory, or the given order
// if none is found. Forward steps stay before backward steps, and steps with an effect stay in
// order.
std::vector<int> choose_order(const Program& program);

// Checks a plan from the live ranges alone, without the planner's code. Throws InternalError on
// overlaps of live memory, broken rules of aliases, effects out of order, reads before writes, an
// in-place write over a tensor that is still read, an input, an output or a gradient that leaves,
// early releases, workspaces or discards of live memory, and tensors that lie in two chunks or
// outlive theirs.
void verify_plan(const Program& program, const Plan& plan, const PlanOptions& options);

}  // namespace torch_ort::plan
