// Keeps the memory of a training step within a budget, or recomputes what a Selection names, if
// either is set (passes/border/budget.h). The nodes that plan.h chooses are added to the
// backward half just before their results are read. Products, attention and PyTorch's operators run
// again unchanged, and so compute the same bits; random draws depend on positions, and are repeated
// as well. Of communication between ranks gathers alone are repeated, by all ranks. Nodes of
// regions are copied, and fuse_regions fuses the copies. A value that a region writes once more for
// another product (rebuild_values.cpp) is not read from a copy instead: it would be held from the
// first product to the second, and a region that reads its inputs anyway writes it in no measurable
// time.
//
// Nodes that are recomputed for different parts of the forward half are never fused, because their
// results would all be live from the first of these parts on.

#include "ir/edit.h"
#include "ops/op.h"
#include "passes/border/budget.h"
#include "passes/border/mover.h"
#include "passes/border/plan.h"
#include "passes/context.h"
#include "passes/data_sizes.h"
#include "passes/halves.h"
#include "passes/memory.h"
#include "passes/unread.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

// Views, and nodes of the backward half that depend on no gradient, are at its beginning. Each
// moves to its first reader, since memory for its result, and for what it reads, is not needed
// before.
class Sinker {
 public:
  explicit Sinker(Graph& graph) : graph_(graph) {
    const SharedMemory memory(graph);
    const DataSizes sizes(graph);
    // Those that depend on the gradients that enter at the border.
    std::unordered_set<const Value*> gradients;
    bool is_backward = false;
    for (Node& node : graph.nodes) {
      if (node.is_erased()) continue;
      const bool reads_gradients =
          std::any_of(node.inputs.begin(), node.inputs.end(),
                      [&](const Value* input) { return gradients.contains(input); });
      (is_backward ? nodes_ : order_).push_back(&node);
      const bool may_move = may_wait(node, memory) && !sizes.is_giver(node);
      if (is_backward && (ops::is_view(node) || !reads_gradients) && may_move) {
        waiting_.insert(&node);
      }
      if (is_border(&node) || reads_gradients) {
        gradients.insert(node.outputs.begin(), node.outputs.end());
      }
      is_backward = is_backward || is_border(&node);
    }
  }

  void run() {
    for (Node* node : nodes_) {
      if (!waiting_.contains(node)) write(node);
    }
    for (Node* node : nodes_) {
      // Nobody reads it, or it is an output.
      if (waiting_.contains(node)) write(node);
    }
    ir::reorder(graph_, order_);
  }

 private:
  static bool may_wait(const Node& node, const SharedMemory& memory) {
    if (!ops::is_pure(node) || !ir::bodies(node).empty()) return false;
    return std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* output) {
      if (output == nullptr) return true;
      const auto is_plain = [](const ir::Use& use) { return use.index >= 0; };
      return !memory.is_written(output) &&
             std::all_of(output->uses.begin(), output->uses.end(), is_plain);
    });
  }

  void write(Node* node) {
    waiting_.erase(node);
    for (const Value* input : node->inputs) {
      if (input != nullptr && waiting_.contains(input->producer)) write(input->producer);
    }
    order_.push_back(node);
  }

  Graph& graph_;
  // The nodes of the backward half, and all nodes in their new order.
  std::vector<Node*> nodes_, order_;
  std::unordered_set<const Node*> waiting_;
};

}  // namespace

int recompute_to_budget(Graph& graph, PassContext& context) {
  using Clock = std::chrono::steady_clock;
  const bool is_asked = context.budget != nullptr || context.selection != nullptr;
  if (!is_asked || backward_nodes(graph).empty()) return 0;
  Sinker(graph).run();
  const Clock::time_point start = Clock::now();
  RecomputePlan plan =
      context.budget != nullptr
          ? plan_recompute(graph, *context.budget, context.communication)
          : plan_recompute(graph, *context.selection, *context.clusters, context.communication);
  plan.report.plan_ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  if (context.budget_report != nullptr) *context.budget_report = plan.report;

  Mover mover(graph);
  std::vector<Node*> nodes;  // that may have lost their readers
  int rewrites = 0;
  for (const Again& again : plan.again) {
    if (!context.may_rewrite()) break;
    if (again.gather != nullptr) mover.copy(*again.gather, *again.before);
    Node& copy = mover.copy(*again.node, *again.before);
    copy.segment = again.segment;
    nodes.insert(nodes.end(), {again.node, &copy});
    ++rewrites;
  }
  mover.redirect_backward_half();
  erase_unread(graph, {nodes.rbegin(), nodes.rend()});
  return rewrites;
}

}  // namespace torch_ort::passes
