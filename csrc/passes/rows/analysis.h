// What row_sparsity finds out about a graph: both sets of each value (row_sparsity.cpp), and the
// rows that each node has to compute.
#pragma once

#include "passes/context.h"
#include "passes/rows/row_set.h"

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes::rows {

// The rows that lists select from: all positions of all sequences.
struct RowSpace {
  ir::Dim sequences = 1, length = 1;
  ir::Dim num_rows() const;
};

// Which dims of a value are those of rows: one dim for sequence and position together, or two dims.
struct Form {
  // -1: the value has no rows.
  int sequence = -1, place = -1;
  bool is_there() const { return sequence >= 0; }
  bool is_joint() const { return sequence == place; }
  // Whether the first dims are those of rows.
  bool is_leading() const { return sequence == 0 && (place == 0 || place == 1); }
  bool has(int64_t axis) const { return axis == sequence || axis == place; }
  // The form after another dim has gone away.
  Form without(int64_t axis) const {
    return {sequence - (axis < sequence ? 1 : 0), place - (axis < place ? 1 : 0)};
  }
  bool operator==(const Form& other) const = default;
};

struct Facts {
  Form form;
  RowSet nonzero = RowSet::all(), needed = RowSet::none();
};

// What a node has to compute: rows of queries, of a region or of a product; and rows of keys.
struct Work {
  RowSet rows = RowSet::all(), keys = RowSet::all();
  // Set for a product that sums over the rows.
  bool sums = false;
  bool is_partial() const { return !rows.is_all() || !keys.is_all(); }
};

// How a region treats rows.
struct RegionRows {
  bool takes_list = false;
  // Set where each row of the results depends only on the same row of the operands, although the
  // region has other rows than the model: those of each head, after a transpose.
  bool follows = false;
  std::vector<bool> has_rows;         // by operand
  std::vector<bool> is_total;         // by output: whether it sums over rows
  RowSet of_totals = RowSet::none();  // the rows that these sums add
};

class Analysis {
 public:
  Analysis(ir::Graph& graph, RowSpace space, RowSources sources);
  void run();

  bool has_atoms() const { return !atoms_.empty(); }
  const std::vector<Atom>& atoms() const { return atoms_; }
  const RowSpace& space() const { return space_; }
  const std::vector<ir::Node*>& nodes() const { return nodes_; }
  // Whether a condition depends on the node.
  bool is_early(const ir::Node& node) const { return early_.contains(&node); }
  bool is_backward(const ir::Node& node) const { return backward_.contains(&node); }
  Work work(const ir::Node& node) const;
  // Whether a reader of the value reads rows that are zero and that nobody computes.
  bool is_zeroed(const ir::Value* value) const { return zeroed_.contains(value); }
  // The rows that a node `Rows` lists.
  RowSet set_of(const ir::Node& rows);

  // ---- for transfer functions

  Facts& of(const ir::Value* value);
  // The form of a value whose first dims are those of rows; none for others.
  Form leading(const ir::Value* value) const;
  // Whether the elements of the value are one for each row, in order.
  bool is_all_rows(const ir::Value* value) const;
  // The rows that the condition selects.
  RowSet atom(const Atom& atom);
  // What is needed of any output.
  RowSet needed_of_outputs(const ir::Node& node);

  void set(const ir::Value* value, Form form, RowSet nonzero);
  void need(const ir::Value* value, const RowSet& rows);
  // The node computes these rows, unless a condition depends on it. Returns what it computes.
  Work compute(const ir::Node& node, Work work);

  std::unordered_map<const ir::Node*, RegionRows> regions;

 private:
  bool may_tell(Atom::Kind kind) const;
  bool find_early();

  ir::Graph& graph_;
  RowSpace space_;
  const RowSources sources_;
  std::vector<ir::Node*> nodes_;
  std::unordered_set<const ir::Node*> backward_, early_;
  std::vector<Atom> atoms_;
  std::unordered_map<const ir::Value*, Facts> facts_;
  std::unordered_map<const ir::Node*, Work> work_;
  std::unordered_set<const ir::Value*> zeroed_;
};

}  // namespace torch_ort::passes::rows
