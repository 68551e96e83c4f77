// Passes rewrite a graph. A pass is a free function; pipeline.cpp declares all passes and lists
// them in order. After a pass the graph computes the same values for the same inputs and outputs.
// Only lazy_logits changes what the graph returns, where it is asked to.
#pragma once

#include "ir/graph.h"
#include "passes/budget.h"
#include "passes/lazy_logits.h"
#include "passes/row_sparsity.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::passes {

// `run` returns the number of rewrites that it made, which is 0 if it runs a second time. It may
// leave erased nodes; its caller sweeps the graph.
struct Pass {
  const char* name;
  int (*run)(ir::Graph& graph);
  bool is_needed = false;  // the engine cannot run a graph without it
  // It adds ops that only the engine's own kernels run, or chooses layouts for them.
  bool writes_engine_ops = false;
  // It changes which values are saved for backward.
  bool moves_border = false;
  // It makes regions, or expresses ops in their language. Without it operators run as PyTorch's
  // kernels.
  bool for_regions = false;
  // What it writes rounds elsewhere than eager PyTorch's kernels, or adds in another order. The
  // option `disable` calls all such passes `own_kernels`.
  bool rounds_elsewhere = false;
  // The name of a pass without which this one is of no use; it does not run if that one is
  // disabled.
  const char* only_with = nullptr;
  // The name of an option in torch_ort/options.py under which it does not run.
  const char* not_with = nullptr;
  // The name of an option under which alone it runs.
  const char* only_under = nullptr;
};

struct PipelineOptions {
  std::vector<std::string> disabled;  // names of passes; other names are ignored
  int64_t bisect = -1;                // the first so many rewrites happen; -1: all
  int check = 0;                      // 1: verify at the ends; 2: after each pass
  // The limit for recompute_to_budget, which does nothing without a budget or a selection.
  std::optional<Budget> budget;
  std::optional<Selection> selection;     // what it recomputes by name; not with a budget
  BudgetReport* budget_report = nullptr;  // filled in by recompute_to_budget
  RowSources row_sources;                 // what row_sparsity may use
  // Where lazy_logits appends what it left out; nullptr: it does nothing.
  std::vector<LazyLogits>* lazy_logits = nullptr;
  // Called after each pass that changed the graph, with a name such as "03_remove_dead".
  std::function<void(const char* name, const ir::Graph& graph)> dump;
};

struct PassReport {
  std::string name;
  int rewrites = 0;
  double ms = 0;
};

const std::vector<Pass>& pipeline();

// Runs the passes in order. An error of a pass is thrown again with "pass <name>: " in front of its
// message.
std::vector<PassReport> run_pipeline(ir::Graph& graph, const PipelineOptions& options);

// Runs only the needed passes, for a graph from a file, which is not to be optimized.
void run_needed(ir::Graph& graph);

// Rewrites indices that count from the end, in a graph from a file (count_from_end.cpp).
int count_from_end(ir::Graph& graph);

// Runs one pass. Throws UserError if there is none of that name.
int run_pass(std::string_view name, ir::Graph& graph);

// A pass asks this before each rewrite. Returns false once `bisect` rewrites have happened. The
// number of rewrites that a pass returns is the number of those for which it has asked, so that the
// sum over the passes that are not needed is the range of `bisect`.
bool may_rewrite();
// A pass calls this if it has asked and then found nothing to rewrite.
void did_not_rewrite();

}  // namespace torch_ort::passes
