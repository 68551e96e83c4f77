// What of the context area goes back to the system during backward; internal to plan/.
#pragma once

#include "plan/arena.h"
#include "plan/plan.h"

#include <vector>

namespace torch_ort::plan {

// Kernels that make results of their own cannot make them in what is dead of the context area, and
// those that want a workspace cannot use it where it is in pieces smaller than they need.
// Finds parts of it, of `smallest` bytes or more, whose going keeps the peak at what memory that is
// freed at its last use would need; none where it is no higher anyway. To fault memory in again
// costs time, so no more is given up than that. `plan`: all but its discards.
std::vector<Discard> find_discards(const Program& program, const Plan& plan,
                                   const std::vector<Block>& blocks, int64_t smallest);

}  // namespace torch_ort::plan
