// Which results of the forward half are made again in the backward half, so that a step holds no
// more than a budget and takes as little longer as possible. Plain numbers of a graph; who writes
// the nodes is recompute_to_budget.cpp.
//
// A minimum cut gives the cheapest choice for a price of a byte that is held; the price is searched
// for. Two things a cut does not see. A chain that is made again goes back to what it is made of:
// from the first layer on, it would bring all at once what has been saved. So the forward half is
// parted at places where little crosses, and what crosses these is never made again; several ways
// of parting are tried. And what is made again lives until its last reader, beside what is still
// held: every choice is followed through the backward half, and the most that lives at one time is
// what is held against the budget.
#pragma once

#include "ir/graph.h"
#include "passes/budget.h"
#include "passes/clusters.h"

#include <vector>

namespace torch_ort::passes {

struct Again {
  ir::Node* node;  // of the forward half
  ir::Node*
      before;  // of the backward half: the first that reads what is made, or what is made of it
  int segment = 0;  // what is made again for the same part of the forward half
};

struct RecomputePlan {
  std::vector<Again> again;  // in the order of the forward half
  BudgetReport report;
};

// Changes nothing. UserError with the least possible bytes if no choice keeps to the budget.
RecomputePlan plan_recompute(ir::Graph& graph, const Budget& budget);

// By name, whatever it saves. What cannot run again, or needs what nobody holds, is made once.
RecomputePlan plan_recompute(ir::Graph& graph, const Selection& selection,
                             const Clusters& clusters);

}  // namespace torch_ort::passes
