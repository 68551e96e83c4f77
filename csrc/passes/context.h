// What a pass gets beside the graph: what it is asked to do, how many rewrites it may make, and
// where it reports. A context serves one run of the pipeline, or of one pass.
#pragma once

#include "passes/border/costs.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::passes {

struct Budget;
struct BudgetReport;
struct Clusters;
struct Cut;
struct LazyLogits;
struct Selection;

// Which inputs may tell row_sparsity what rows nobody reads. Positions, as in x[:, 0], always may.
struct RowSources {
  bool labels = true;   // labels of losses that have an ignored label
  bool padding = true;  // keys that masks hide
};

struct PassContext {
  // How many more rewrites may happen; -1: any number.
  int64_t rewrites_left = -1;

  // The limit for recompute_to_budget, or what it recomputes by name; not both. nullptr: none.
  const Budget* budget = nullptr;
  const Selection* selection = nullptr;
  // recompute_to_budget fills it in, and row_sparsity adds its lists. nullptr: no report.
  BudgetReport* budget_report = nullptr;
  // What find_clusters has found for recompute_to_budget, if there is a selection.
  std::shared_ptr<const Clusters> clusters;

  RowSources row_sources;

  Communication communication;

  // What cut_backward cuts out, and where it reports. nullptr: nothing.
  Cut* cut = nullptr;

  // Where lazy_logits appends what it leaves to the caller. nullptr: it leaves nothing.
  std::vector<LazyLogits>* lazy_logits = nullptr;

  // Whether read_sizes gives a dim of a point-wise result, where two symbols meet, a symbol of its
  // own, for a reader that needs all ranks and learns sizes from tensors.
  bool names_sizes = false;

  // A pass that is not needed asks this before each rewrite. False if no more may happen. The
  // number of rewrites that a pass returns is the number of those for which it has asked, so that
  // the sum over these passes is the range of a bisection.
  bool may_rewrite() {
    if (rewrites_left == 0) return false;
    if (rewrites_left > 0) --rewrites_left;
    return true;
  }
  // A pass calls this if it has asked and then found nothing to rewrite.
  void did_not_rewrite() {
    if (rewrites_left >= 0) ++rewrites_left;
  }
};

}  // namespace torch_ort::passes
