// Which parts of the context area are returned to the system during backward; internal to plan/.
#pragma once

#include "plan/arena.h"
#include "plan/plan.h"

#include <vector>

namespace torch_ort::plan {

// Some kernels allocate their own results, which cannot use dead memory of the context area.
// Kernels that want a workspace cannot use it where its free pieces are too small for them.
// Returns parts of the context area, each of PlanOptions::discard_bytes or more, whose return to
// the system keeps the peak at what it would be if all memory were freed at its last use. Returns
// none if that lowers the peak by less than PlanOptions::discard_gain, because returned memory
// costs time when it is used again. `plan` is complete except for its discards.
std::vector<Discard> find_discards(const Program& program, const Plan& plan,
                                   const std::vector<Block>& blocks, const PlanOptions& options);

}  // namespace torch_ort::plan
