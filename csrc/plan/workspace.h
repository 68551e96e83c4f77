// Dead memory that kernels use as workspace; internal to plan/.
#pragma once

#include "plan/arena.h"
#include "plan/plan.h"

#include <vector>

namespace torch_ort::plan {

// For each step that can use a workspace: a few of the largest parts of the areas in which nothing
// is live while it runs, largest first.
std::vector<Workspace> find_workspaces(const Program& program, const Plan& plan,
                                       const std::vector<Block>& blocks,
                                       const PlanOptions& options);

}  // namespace torch_ort::plan
