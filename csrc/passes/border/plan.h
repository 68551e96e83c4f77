// Chooses which results of the forward half the backward half recomputes, so that a training step
// stays within a memory budget at the least additional time. This file only plans;
// recompute_to_budget.cpp writes the nodes.
//
// For a given price of a saved byte a minimum cut finds the cheapest choice, and the price is
// searched for. A cut does not see two things. First, a chain that is recomputed goes back to its
// saved inputs: from the first layer on, it would bring back at once all the memory that was saved.
// So the forward half is divided at places where little crosses, and what crosses there is never
// recomputed; several divisions are tried. Second, a recomputed value is live until its last
// reader, beside values that are still saved. So each choice is followed through the backward half,
// and its peak is compared with the budget.
#pragma once

#include "ir/graph.h"
#include "passes/border/budget.h"
#include "passes/border/clusters.h"

#include <vector>

namespace torch_ort::passes {

// One node of the forward half that is recomputed.
struct Again {
  ir::Node* node;
  // The gather that it waits for, which is repeated before it; nullptr for all other nodes.
  const ir::Node* gather;
  // The node of the backward half before which it is recomputed: the first that reads its result,
  // or anything that is recomputed from it.
  ir::Node* before;
  int segment = 0;  // the part of the forward half that it belongs to
};

struct RecomputePlan {
  std::vector<Again> again;  // in the order of the forward half
  BudgetReport report;
};

// Plans for a budget; does not change the graph. Throws UserError, with the least possible bytes,
// if no choice stays within the budget. Where ranks communicate they all plan alike: by the sizes
// of the graph, and not by the speeds that each of them has measured.
RecomputePlan plan_recompute(ir::Graph& graph, const Budget& budget,
                             const Communication& communication);

// Plans what is selected by name, whatever that saves. Nodes that cannot run again, or need a value
// that is not available, are not recomputed.
RecomputePlan plan_recompute(ir::Graph& graph, const Selection& selection, const Clusters& clusters,
                             const Communication& communication);

}  // namespace torch_ort::passes
