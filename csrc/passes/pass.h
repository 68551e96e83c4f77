// Passes rewrite a graph. A pass is a free function; pipeline.cpp declares all passes and lists
// them in order. After a pass the graph computes the same values for the same inputs and outputs.
// Only lazy_logits changes what the graph returns, where it is asked to.
#pragma once

#include "ir/graph.h"
#include "passes/context.h"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_ort::passes {

// `run` returns the number of rewrites that it made, which is 0 if it runs a second time. It may
// leave erased nodes; its caller sweeps the graph.
struct Pass {
  const char* name;
  int (*run)(ir::Graph& graph, PassContext& context);
  // Runs it again on a training graph of which the backward half has been cut down to what the
  // gradients of some outputs reach. It must not change values of the forward half. nullptr: it
  // finds nothing more.
  int (*run_after_cut)(ir::Graph& graph, PassContext& context) = nullptr;
  bool is_needed = false;      // the engine cannot run a graph without it
  bool is_on_request = false;  // it does nothing unless a field of PassContext asks for it
  bool is_for_gpus = false;    // it rewrites nothing that runs on a CPU
  // It infers the strides that a graph from a file lacks.
  bool tells_strides = false;
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
  // It makes tensors that are held for backward beside what a memory budget has counted
  // (BudgetReport::list_bytes).
  bool adds_to_budget = false;
  // It decides about communication by what one rank sees, such as the pads of a part that is
  // smaller than those of other ranks.
  bool decides_by_rank = false;
  // What the engine runs by kernels of its own because of it, in the words of the log.
  const char* own_kernels = nullptr;
  // It writes what only the engine's own kernels for products, or those of regions, compute as it
  // expects. Where others run, it does not.
  bool needs_products = false;
  bool needs_region_kernels = false;
  // The name of a pass without which this one is of no use; it does not run if that one is
  // disabled.
  const char* only_with = nullptr;
  // The name of an option in torch_ort/options.py under which it does not run.
  const char* not_with = nullptr;
  // The name of an option without which it does not run.
  const char* only_under = nullptr;
};

struct PipelineOptions {
  std::vector<std::string> disabled;  // names of passes; other names are ignored
  int check = 0;                      // 1: verify at the ends; 2: after each pass
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
std::vector<PassReport> run_pipeline(ir::Graph& graph, const PipelineOptions& options,
                                     PassContext& context);

// Cuts a training graph as context.cut says, for a variant of a session, and runs again what may
// find more to do in it then (Pass::run_after_cut). `disabled` is that of the pipeline.
void run_on_variant(ir::Graph& graph, const std::vector<std::string>& disabled,
                    PassContext& context);

// Makes a graph from a file, which is not to be optimized, ready to be lowered: runs only the
// needed passes, infers the types that are left out, and checks those and the regions that there
// are. Throws UserError or Unsupported. `names_sizes` is that of the context.
void prepare_file(ir::Graph& graph, bool names_sizes = false);

// Runs one pass, of which nothing is asked. Throws UserError if there is none of that name.
int run_pass(std::string_view name, ir::Graph& graph);

}  // namespace torch_ort::passes
