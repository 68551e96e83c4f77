// Writes what an Analysis has found into its graph: lists of rows, and zeros.
#pragma once

#include "ir/edit.h"
#include "passes/rows/analysis.h"

#include <map>
#include <string>
#include <vector>

namespace torch_ort::passes::rows {

class Rewriter {
 public:
  Rewriter(ir::Graph& graph, Analysis& analysis) : graph_(graph), rows_(analysis) {}

  int run(PassContext& context);
  // The same for a graph that has been rewritten before, and whose backward half has been cut down
  // since. Nodes of the forward half keep the lists that they have, or compute all rows.
  int run_again();

  // ---- for transfer functions

  const RowSpace& space() const { return rows_.space(); }
  // The node that lists the rows; there is one for each set.
  ir::Value* list(const RowSet& rows);
  // One of our ops computes the result of the node in its place.
  void replace(ir::Node& node, std::string op, std::vector<ir::Value*> inputs, ir::Attrs attrs);

 private:
  ir::Value* make_list(const RowSet& rows);
  void move_early();
  void write_zeros(ir::Node& node, ir::Value& value);
  bool has_enough(const ir::Node& node);
  void report_lists(const Budget* budget, BudgetReport& report) const;

  ir::Graph& graph_;
  Analysis& rows_;
  ir::Node* first_ = nullptr;
  ir::Device device_;
  std::map<RowSet, ir::Value*> lists_;
};

}  // namespace torch_ort::passes::rows
