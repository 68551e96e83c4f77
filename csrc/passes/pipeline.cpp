// The ordered list of passes, and what is done around each of them: switches, counting, timing,
// checks, dumps.

#include "base/error.h"
#include "base/failpoint.h"
#include "ir/edit.h"
#include "ir/verify.h"
#include "ops/control_flow.h"
#include "ops/op.h"
#include "passes/cut_backward.h"
#include "passes/layouts.h"
#include "passes/pass.h"
#include "region/schedule.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

namespace torch_ort::passes {

// Each is in the file of its name.
int close_bodies(ir::Graph& graph, PassContext& context);
int read_sizes(ir::Graph& graph, PassContext& context);
int drop_round_trips(ir::Graph& graph, PassContext& context);
int remove_identity(ir::Graph& graph, PassContext& context);
int fold_constants(ir::Graph& graph, PassContext& context);
int merge_equal(ir::Graph& graph, PassContext& context);
int find_clusters(ir::Graph& graph, PassContext& context);
int instance_norms(ir::Graph& graph, PassContext& context);
int fuse_attention(ir::Graph& graph, PassContext& context);
int chunk_losses(ir::Graph& graph, PassContext& context);
int lazy_logits(ir::Graph& graph, PassContext& context);
int recompute_tagged(ir::Graph& graph, PassContext& context);
int channels_last(ir::Graph& graph, PassContext& context);
int widen_convolutions(ir::Graph& graph, PassContext& context);
int winograd(ir::Graph& graph, PassContext& context);
int depthwise_convolutions(ir::Graph& graph, PassContext& context);
int multiply_pixels(ir::Graph& graph, PassContext& context);
int join_patches(ir::Graph& graph, PassContext& context);
int convolution_products(ir::Graph& graph, PassContext& context);
int convolution_weights(ir::Graph& graph, PassContext& context);
int replay_views(ir::Graph& graph, PassContext& context);
int remove_dead(ir::Graph& graph, PassContext& context);
int draw_as_eager(ir::Graph& graph, PassContext& context);
int expand_composites(ir::Graph& graph, PassContext& context);
int take_places(ir::Graph& graph, PassContext& context);
int move_concats(ir::Graph& graph, PassContext& context);
int draw_in_regions(ir::Graph& graph, PassContext& context);
int join_views(ir::Graph& graph, PassContext& context);
int split_convolutions(ir::Graph& graph, PassContext& context);
int accumulate_sums(ir::Graph& graph, PassContext& context);
int rebuild_values(ir::Graph& graph, PassContext& context);
int recompute_to_budget(ir::Graph& graph, PassContext& context);
int widen_products(ir::Graph& graph, PassContext& context);
int widen_sums(ir::Graph& graph, PassContext& context);
int join_lookups(ir::Graph& graph, PassContext& context);
int fuse_regions(ir::Graph& graph, PassContext& context);
int cut_backward(ir::Graph& graph, PassContext& context);
int scatter_slices(ir::Graph& graph, PassContext& context);
int add_slices(ir::Graph& graph, PassContext& context);
int row_sparsity(ir::Graph& graph, PassContext& context);
int join_casts(ir::Graph& graph, PassContext& context);
int overlap_collectives(ir::Graph& graph, PassContext& context);
int gather_again(ir::Graph& graph, PassContext& context);
int bucket_collectives(ir::Graph& graph, PassContext& context);
int join_collectives(ir::Graph& graph, PassContext& context);
int row_sparsity_again(ir::Graph& graph, PassContext& context);
// Rewrites indices that count from the end, in a graph from a file.
int count_from_end(ir::Graph& graph, PassContext& context);

namespace {

// Runs a pass on a graph, and on the bodies of If and Loop in it.
int run_everywhere(const Pass& pass, ir::Graph& graph, PassContext& context) {
  int rewrites = pass.run(graph, context);
  ir::sweep(graph);
  for (const ir::Node& node : graph.nodes) {
    if (!ops::is_closed(node)) continue;
    for (const auto& body : ir::bodies(node)) rewrites += run_everywhere(pass, *body, context);
  }
  return rewrites;
}

int run_one(const Pass& pass, ir::Graph& graph, PassContext& context) {
  const auto message = [&](const Error& error) {
    return concat("pass ", pass.name, ": ", error.what());
  };
  try {
    may_fail(pass.name);
    return run_everywhere(pass, graph, context);
  } catch (const Unsupported& error) {
    throw Unsupported(message(error));
  } catch (const UserError& error) {
    throw UserError(message(error));
  } catch (const InternalError& error) {
    throw InternalError(message(error));
  }
}

void verify_all(const ir::Graph& graph, std::string_view stage) {
  ir::verify(graph, stage);
  region::verify(graph, stage);
}

// Whether the pass is disabled by name, or the one without which it is of no use.
bool is_disabled(const Pass& pass, const std::vector<std::string>& disabled) {
  return std::any_of(disabled.begin(), disabled.end(), [&](const std::string& name) {
    return name == pass.name || (pass.only_with != nullptr && name == pass.only_with);
  });
}

std::string numbered(size_t number, const char* name) {
  char digits[8];
  std::snprintf(digits, sizeof digits, "%02d_", static_cast<int>(number));
  return digits + std::string(name);
}

}  // namespace

const std::vector<Pass>& pipeline() {
  static const std::vector<Pass> passes = {
      // before all others, which run on closed bodies as on any graph
      {.name = "close_bodies", .run = close_bodies, .is_needed = true, .writes_engine_ops = true},
      {.name = "read_sizes", .run = read_sizes, .is_needed = true, .tells_strides = true},
      // before remove_identity, which removes the Identity nodes that it writes
      {.name = "drop_round_trips",
       .run = drop_round_trips,
       .rounds_elsewhere = true,
       .not_with = "emulate_eager_casts"},
      {.name = "remove_identity", .run = remove_identity},
      {.name = "fold_constants", .run = fold_constants},
      // after fold_constants and remove_identity: both make inputs of equal nodes the same value
      {.name = "merge_equal", .run = merge_equal},
      // before all that replace nodes, since it numbers those that were captured
      {.name = "find_clusters", .run = find_clusters, .is_on_request = true},
      // after find_clusters; before all that read slices, or choose layouts
      {.name = "scatter_slices", .run = scatter_slices, .writes_engine_ops = true},
      // before replay_views, which gives each half views of its own; before channels_last
      {.name = "instance_norms", .run = instance_norms, .rounds_elsewhere = true},
      // after merge_equal; before recompute_tagged and replay_views, which copy nodes that it looks
      // for from the forward into the backward half; its kernel rounds only results
      {.name = "fuse_attention",
       .run = fuse_attention,
       .writes_engine_ops = true,
       .rounds_elsewhere = true,
       .own_kernels = "attention",
       .not_with = "emulate_eager_casts"},
      // as fuse_attention; before expand_composites, which expands the other losses
      {.name = "chunk_losses",
       .run = chunk_losses,
       .writes_engine_ops = true,
       .rounds_elsewhere = true,
       .not_with = "emulate_eager_casts"},
      // after chunk_losses, whose node computes the logits that the graph returns
      {.name = "lazy_logits",
       .run = lazy_logits,
       .is_on_request = true,
       .writes_engine_ops = true,
       .only_with = "chunk_losses"},
      {.name = "recompute_tagged", .run = recompute_tagged, .moves_border = true},
      // after instance_norms, which finds images of norms, and all that look for tensors of three
      // dims, such as those of attention; before channels_last
      {.name = "widen_convolutions", .run = widen_convolutions, .rounds_elsewhere = true},
      // after recompute_tagged, which goes by the tags of captured nodes; before replay_views: it
      // makes views that both halves read
      {.name = "channels_last",
       .run = channels_last,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // after channels_last, which has channels lie side by side
      {.name = "winograd", .run = winograd, .writes_engine_ops = true, .rounds_elsewhere = true},
      // as winograd
      {.name = "depthwise_convolutions",
       .run = depthwise_convolutions,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // after channels_last, which makes pixels the rows of a matrix; before replay_views: it makes
      // views
      {.name = "multiply_pixels",
       .run = multiply_pixels,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // as multiply_pixels
      {.name = "join_patches",
       .run = join_patches,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // after winograd and multiply_pixels, which leave it what they have nothing better for
      {.name = "convolution_products",
       .run = convolution_products,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // after winograd, which leaves it the other gradients
      {.name = "convolution_weights",
       .run = convolution_weights,
       .writes_engine_ops = true,
       .rounds_elsewhere = true},
      // after recompute_tagged: views that it recomputes need no second view
      {.name = "replay_views", .run = replay_views, .is_needed = true, .moves_border = true},
      // after replay_views: backward has views of its own of what is gathered
      {.name = "gather_again", .run = gather_again, .moves_border = true, .decides_by_rank = true},
      // after all that look for a whole dropout; before expand_composites, which draws by the same
      // kernel on all devices
      {.name = "draw_as_eager",
       .run = draw_as_eager,
       .is_for_gpus = true,
       .writes_engine_ops = true,
       .only_with = "expand_composites",
       .only_under = "exact_random"},
      // after all that look for composite ops, which it expands
      {.name = "expand_composites",
       .run = expand_composites,
       .writes_engine_ops = true,
       .for_regions = true,
       .rounds_elsewhere = true},
      // not with emulate_eager_casts: its kernels add bfloat16 and float16 in float32
      {.name = "take_places",
       .run = take_places,
       .writes_engine_ops = true,
       .for_regions = true,
       .only_with = "expand_composites",
       .not_with = "emulate_eager_casts"},
      // after expand_composites: gated activations and dropout are point-wise nodes then
      {.name = "move_concats", .run = move_concats, .writes_engine_ops = true, .for_regions = true},
      // after move_concats, which has better uses for sums of a few large parts
      {.name = "add_slices",
       .run = add_slices,
       .writes_engine_ops = true,
       .only_with = "scatter_slices"},
      // only regions can draw the engine's random masks
      {.name = "draw_in_regions",
       .run = draw_in_regions,
       .writes_engine_ops = true,
       .only_with = "fuse_regions",
       .not_with = "exact_random"},
      // after all that write views; before remove_dead: the first of two views may lose its reader
      {.name = "join_views", .run = join_views},
      // after all that leave unread nodes, which regions would compute
      {.name = "remove_dead", .run = remove_dead},
      // after remove_dead, since each sum must have one reader; before fuse_regions, which fuses
      // additions
      {.name = "join_collectives",
       .run = join_collectives,
       .rounds_elsewhere = true,
       .decides_by_rank = true,
       .not_with = "emulate_eager_casts"},
      // after channels_last, which expects the gradient of a convolution as one node
      {.name = "split_convolutions", .run = split_convolutions},
      // after join_views, which takes away the transposes between products and their sums; needs
      // the engine's products, since PyTorch's copy the numbers that they start from
      {.name = "accumulate_sums",
       .run = accumulate_sums,
       .rounds_elsewhere = true,
       .needs_products = true,
       .not_with = "emulate_eager_casts"},
      // after remove_dead: dead nodes would count as readers; before fuse_regions, whose regions it
      // estimates
      {.name = "rebuild_values",
       .run = rebuild_values,
       .moves_border = true,
       .only_with = "fuse_regions"},
      // after rebuild_values: values that cost nothing are not saved any more
      {.name = "recompute_to_budget",
       .run = recompute_to_budget,
       .is_on_request = true,
       .moves_border = true},
      // before fuse_regions, which fuses casts
      {.name = "widen_products",
       .run = widen_products,
       .is_for_gpus = true,
       .writes_engine_ops = true,
       .rounds_elsewhere = true,
       .not_with = "emulate_eager_casts"},
      // before fuse_regions, which casts what it adds in registers
      {.name = "widen_sums",
       .run = widen_sums,
       .is_for_gpus = true,
       .rounds_elsewhere = true,
       .only_with = "fuse_regions",
       .not_with = "emulate_eager_casts"},
      // after all that look for gradients of one table; before fuse_regions, which reads rows of
      // few tables in place
      {.name = "join_lookups",
       .run = join_lookups,
       .writes_engine_ops = true,
       .for_regions = true,
       .only_with = "expand_composites"},
      {.name = "fuse_regions",
       .run = fuse_regions,
       .writes_engine_ops = true,
       .for_regions = true,
       .rounds_elsewhere = true,
       .own_kernels = "fused regions"},
      // after fuse_regions, since it cuts regions as well; before row_sparsity, which finds more
      // rows
      // to leave out in a half that is cut down
      {.name = "cut_backward", .run = cut_backward, .is_needed = true, .is_on_request = true},
      // after fuse_regions: it tells regions, products and attention which rows to leave out
      {.name = "row_sparsity",
       .run = row_sparsity,
       .run_after_cut = row_sparsity_again,
       .writes_engine_ops = true,
       .for_regions = true,
       .rounds_elsewhere = true,
       .adds_to_budget = true,
       .needs_products = true,
       .needs_region_kernels = true,
       .only_with = "fuse_regions",
       .not_with = "emulate_eager_casts",
       .only_under = "enable_sparse_optimizer"},
      // after all that look for single casts
      {.name = "join_casts", .run = join_casts, .is_for_gpus = true, .writes_engine_ops = true},
      // after join_collectives and fuse_regions: operands are what is left of both
      {.name = "bucket_collectives",
       .run = bucket_collectives,
       .rounds_elsewhere = true,
       .decides_by_rank = true},
      // last: it only moves nodes, by the time that they take
      {.name = "overlap_collectives", .run = overlap_collectives},
  };
  return passes;
}

std::vector<PassReport> run_pipeline(ir::Graph& graph, const PipelineOptions& options,
                                     PassContext& context) {
  using Clock = std::chrono::steady_clock;
  if (options.check >= 1) verify_all(graph, "capture");
  std::vector<PassReport> reports;
  for (const Pass& pass : pipeline()) {
    if (is_disabled(pass, options.disabled)) {
      // What it does for checkpoints, recompute_to_budget does for budgets.
      if (pass.run == gather_again) context.communication.gathers_again = false;
      continue;
    }
    std::optional<CountedStrides> strides;
    if (options.check >= 2 && !pass.tells_strides) strides.emplace(graph);
    const Clock::time_point start = Clock::now();
    const int rewrites = run_one(pass, graph, context);
    const std::chrono::duration<double, std::milli> time = Clock::now() - start;
    reports.push_back({pass.name, rewrites, time.count()});
    if (options.check >= 2) verify_all(graph, pass.name);
    if (strides) strides->verify(graph, pass.name);
    if (rewrites > 0 && options.dump)
      options.dump(numbered(reports.size(), pass.name).c_str(), graph);
  }
  if (options.check == 1) verify_all(graph, "passes");
  return reports;
}

void run_on_variant(ir::Graph& graph, const std::vector<std::string>& disabled,
                    PassContext& context) {
  cut_backward(graph, context);
  // A half alone reads what other plans have computed, lists of rows included.
  if (context.cut->is_half_alone) return;
  for (const Pass& pass : pipeline()) {
    if (pass.run_after_cut == nullptr || is_disabled(pass, disabled)) continue;
    pass.run_after_cut(graph, context);
    ir::sweep(graph);
  }
}

void prepare_file(ir::Graph& graph, bool names_sizes) {
  PassContext context;
  context.names_sizes = names_sizes;
  for (const Pass& pass : pipeline()) {
    if (pass.is_needed) run_one(pass, graph, context);
  }
  // after read_sizes, which infers the types that the file leaves out
  run_one({"count_from_end", count_from_end}, graph, context);
  ops::infer_types(graph);
  ops::check_types(graph);
  region::check_file(graph);
}

int run_pass(std::string_view name, ir::Graph& graph) {
  std::string names;
  PassContext context;
  for (const Pass& pass : pipeline()) {
    if (pass.name == name) return run_one(pass, graph, context);
    names += names.empty() ? pass.name : concat(", ", pass.name);
  }
  throw UserError(concat("passes: unknown pass: got '", name, "', want one of ", names));
}

}  // namespace torch_ort::passes
