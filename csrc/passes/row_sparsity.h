// Rows that nobody reads are not computed.
//
// The values of a model of sequences have rows: one for each place of each sequence. Some rows of a
// value are read by nobody (what stands behind an ignored label, a padded key, a slice), and some
// of a gradient are zeros for the same reasons. Which rows these are is told by data, in each call,
// before the first of them is computed.
//
//   tokens -> embedding -> block -> block -> x[:, 0] -> loss
//                            \ mask: keys behind the end of a sequence are hidden
//
// Tensors keep their shapes and their places. A node that has a list of rows (torch_ort.Rows)
// computes those alone, and leaves the others of its results as they are in memory. So a new list
// asks for no other plan, and a list of all rows costs nothing.
//
// Two sets belong to each value with rows:
//   nonzero  rows outside of it are zeros by what the graph says: the way of gradients, forward
//            through the nodes
//   needed   rows that some reader reads: backward through the nodes
// A node computes the rows that are both. Rows that are needed and lie outside of it are zeros, and
// are written so where somebody reads them (torch_ort.ZeroRows).
//
// Sets are unions of atoms, of which each is told by a tensor of the graph, or by a place in each
// sequence. Where the union of two sets, or what both have in common, is no such union, a larger
// one stands for it: it is always right to compute more rows.
#pragma once

#include "ir/graph.h"

#include <cstdint>

namespace torch_ort::passes {

// What may tell rows; places, as of x[:, 0], always may.
struct RowSources {
  bool labels = true;   // those of losses that ignore one
  bool padding = true;  // keys that masks hide
};

// In force on this thread while it lives.
class RowSourcesInForce {
 public:
  explicit RowSourcesInForce(RowSources sources);
  ~RowSourcesInForce();
  RowSourcesInForce(const RowSourcesInForce&) = delete;
  RowSourcesInForce& operator=(const RowSourcesInForce&) = delete;

  static RowSources sources();  // all of them where none are in force

 private:
  RowSources before_;
};

class RowSet {
 public:
  static RowSet none() { return {}; }
  static RowSet all() { return RowSet(true, 0, false); }
  static RowSet atom(int index) { return RowSet(false, uint64_t{1} << index, false); }

  bool is_all() const { return is_all_; }
  bool is_none() const { return !is_all_ && atoms_ == 0; }
  uint64_t atoms() const { return atoms_; }
  bool is_closed() const { return is_closed_; }

  // With all rows of a sequence before the last one that is in it.
  RowSet closed() const { return is_all_ || is_none() ? *this : RowSet(false, atoms_, true); }
  bool contains(const RowSet& other) const;
  bool operator==(const RowSet& other) const = default;
  auto operator<=>(const RowSet& other) const = default;

  friend RowSet unite(const RowSet& a, const RowSet& b);
  // What contains all rows that both have, and is no larger than either of them where one contains
  // the other.
  friend RowSet intersect(const RowSet& a, const RowSet& b);

 private:
  RowSet() = default;
  RowSet(bool is_all, uint64_t atoms, bool is_closed)
      : is_all_(is_all), is_closed_(is_closed), atoms_(atoms) {}

  bool is_all_ = false, is_closed_ = false;
  uint64_t atoms_ = 0;
};

// For a graph that has been through the pass, and whose backward half has since been cut down to
// what the gradients of some outputs reach: fewer rows of that half may count now. Where logits
// leave a model beside its loss and get no gradient, those without a label do not. Values of the
// forward half stay the same ones. False if it has changed nothing.
bool row_sparsity_again(ir::Graph& graph);

}  // namespace torch_ort::passes
