// Dead memory for what kernels need for themselves; internal to plan/.
#pragma once

#include "plan/arena.h"
#include "plan/plan.h"

#include <vector>

namespace torch_ort::plan {

// For each step that wants some, the few largest parts of the areas in which nothing lives while it
// runs, the largest first.
std::vector<Workspace> find_workspaces(const Program& program, const Plan& plan,
                                       const std::vector<Block>& blocks,
                                       const PlanOptions& options);

}  // namespace torch_ort::plan
