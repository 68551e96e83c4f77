// Leaves out the computation of rows that nobody reads.
//
// The values of a sequence model have a row for each position of each sequence. Some rows of a
// value are read by nobody: those with an ignored label, those of padded keys, those that a slice
// leaves out. Some rows of a gradient are zero for the same reasons. Data decides which rows these
// are, in each call, before the first of them is computed.
//
//   tokens -> embedding -> block -> block -> x[:, 0] -> loss
//                            \ mask: keys behind the end of a sequence are hidden
//
// Tensors keep their shapes and addresses. A node that has a list of rows (torch_ort.Rows) computes
// only those rows and does not write the others. So a new list needs no new plan, and with a list
// of all rows a kernel runs as it does without one.
//
// Each value with rows has two sets:
//   nonzero  Rows outside of it are known to be zero. It is propagated forward through the nodes,
//            which is the direction of gradients.
//   needed   Rows that some reader reads. It is propagated backward through the nodes.
// A node computes the rows that are in both sets. Rows that are needed but not in `nonzero` are
// zero, and are written as zeros where somebody reads them (torch_ort.ZeroRows).
//
// Sets are in rows/row_set.h, and are found by rows/analysis.h. What an op does to rows is a row of
// its family in rows/ (rows/transfer.h). Lists are written by rows/rewriter.h.
#include "ir/edit.h"
#include "ops/fusion.h"
#include "passes/context.h"
#include "passes/rows/rewriter.h"

#include <algorithm>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;

bool is_ours(const Node& node, std::string_view name) {
  return ir::is(&node, name, ir::kTorchOrtDomain);
}

// The rows of the model: the positions of the first attention over sequences, or the labels of a
// loss.
std::optional<rows::RowSpace> find_space(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (node.is_erased() || !is_ours(node, "Attention")) continue;
    const auto &query = node.inputs[0]->type.shape, &key = node.inputs[1]->type.shape;
    if (query && key && query->size() == 4 && (*query)[2] == (*key)[2]) {
      return rows::RowSpace{(*query)[0], (*query)[2]};
    }
  }
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (is_ours(node, "LinearCrossEntropy") && node.inputs[2]->type.shape) {
      return rows::RowSpace{1, ir::numel(*node.inputs[2]->type.shape)};
    }
    if (!is_ours(node, "Region")) continue;
    for (const Node& inner : ops::region_body(node).nodes) {
      if (is_ours(inner, "RowPick") && inner.inputs[1]->type.shape) {
        return rows::RowSpace{1, ir::numel(*inner.inputs[1]->type.shape)};
      }
    }
  }
  return std::nullopt;
}

// Finds out which rows nobody reads, and lets `write` leave them out; returns what it has
// rewritten. 0 if nothing in the graph can tell of such rows.
template <typename Write>
int rewrite_rows(Graph& graph, const PassContext& context, Write write) {
  const std::optional<rows::RowSpace> space = find_space(graph);
  if (!space) return 0;
  rows::Analysis analysis(graph, *space, context.row_sources);
  analysis.run();
  if (!analysis.has_atoms()) return 0;
  rows::Rewriter rewriter(graph, analysis);
  return write(rewriter);
}

}  // namespace

// If the backward half has been cut down, fewer rows of it may be needed: if logits are returned
// beside a loss but get no gradient, rows without a label are not.
int row_sparsity_again(Graph& graph, PassContext& context) {
  return rewrite_rows(graph, context,
                      [](rows::Rewriter& rewriter) { return rewriter.run_again(); });
}

int row_sparsity(Graph& graph, PassContext& context) {
  const auto is_done = [](const Node& node) { return is_ours(node, "Rows"); };
  if (std::any_of(graph.nodes.begin(), graph.nodes.end(), is_done)) return 0;
  return rewrite_rows(graph, context,
                      [&](rows::Rewriter& rewriter) { return rewriter.run(context); });
}

}  // namespace torch_ort::passes
