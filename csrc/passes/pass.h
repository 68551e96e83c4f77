// Rewrites of a graph. A pass is a free function; pipeline.cpp declares and lists them in order.
// After a pass the graph computes the same values, and its inputs and outputs are the same ones,
// but for outputs that lazy_logits is asked to leave to the caller.
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

// `run` gives the number of rewrites that it made, 0 when it runs a second time.
// It may leave tombstones: who runs it sweeps the graph.
struct Pass {
  const char* name;
  int (*run)(ir::Graph& graph);
  bool is_needed = false;  // the engine runs no graph that has not seen it
  // It writes what only the engine's own kernels read, or chooses layouts for them.
  bool writes_engine_ops = false;
  bool moves_border = false;  // it changes what crosses from the forward half to the backward one
  // It makes regions, or writes in their language: without it operators run as PyTorch has them.
  bool for_regions = false;
  // A pass without which its work would be in vain: it does not run where that one does not.
  const char* only_with = nullptr;
  const char* not_with = nullptr;  // an option of torch_ort/options.py under which it does not run
};

struct PipelineOptions {
  std::vector<std::string> disabled;   // names of passes; other names are not ours
  int64_t bisect = -1;                 // only that many rewrites happen; -1: all
  int check = 0;                       // 1: verify at the ends; 2: after each pass
  std::optional<Budget> budget;        // what recompute_to_budget keeps to; none: it does nothing
  std::optional<Selection> selection;  // what it makes again by name; not beside a budget
  BudgetReport* budget_report = nullptr;  // filled in by it
  RowSources row_sources;                 // what row_sparsity goes by
  // Where lazy_logits says what it has left out; nullptr: it does nothing.
  std::vector<LazyLogits>* lazy_logits = nullptr;
  // Called after each pass that changed something, with "03_remove_dead".
  std::function<void(const char* name, const ir::Graph& graph)> dump;
};

struct PassReport {
  std::string name;
  int rewrites = 0;
  double ms = 0;
};

const std::vector<Pass>& pipeline();

// Errors of a pass are raised again, with "pass <name>: " in front.
std::vector<PassReport> run_pipeline(ir::Graph& graph, const PipelineOptions& options);

// The needed passes alone: for a graph from a file, which is to run as it stands there.
void run_needed(ir::Graph& graph);

// Indices of a graph from a file, which may count from the end (count_from_end.cpp).
int count_from_end(ir::Graph& graph);

// One pass by its name. UserError if there is none.
int run_pass(std::string_view name, ir::Graph& graph);

// Asked by a pass before each rewrite: false once `bisect` of them have happened. What a pass
// counts as its rewrites are those for which it has asked, so that their sum over the passes that
// are not needed is where `bisect` ends.
bool may_rewrite();
// Said by a pass that has asked and then found that it has nothing to rewrite.
void did_not_rewrite();

}  // namespace torch_ort::passes
