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
// A set is a union of atoms. Each atom is defined by a tensor of the graph, or by a position in
// each sequence. If a union or an intersection of two sets cannot be expressed so, a larger set
// replaces it: it is always correct to compute more rows.
#pragma once

#include "ir/graph.h"

#include <cstdint>

namespace torch_ort::passes {

class RowSet {
 public:
  static RowSet none() { return {}; }
  static RowSet all() { return RowSet(true, 0, false); }
  static RowSet atom(int index) { return RowSet(false, uint64_t{1} << index, false); }

  bool is_all() const { return is_all_; }
  bool is_none() const { return !is_all_ && atoms_ == 0; }
  uint64_t atoms() const { return atoms_; }
  bool is_closed() const { return is_closed_; }

  // The set with all rows of a sequence before the last one that is in it.
  RowSet closed() const { return is_all_ || is_none() ? *this : RowSet(false, atoms_, true); }
  bool contains(const RowSet& other) const;
  bool operator==(const RowSet& other) const = default;
  auto operator<=>(const RowSet& other) const = default;

  friend RowSet unite(const RowSet& a, const RowSet& b);
  // A set that contains all rows that are in both. If one of the two contains the other, it is the
  // smaller one.
  friend RowSet intersect(const RowSet& a, const RowSet& b);

 private:
  RowSet() = default;
  RowSet(bool is_all, uint64_t atoms, bool is_closed)
      : is_all_(is_all), is_closed_(is_closed), atoms_(atoms) {}

  bool is_all_ = false, is_closed_ = false;
  uint64_t atoms_ = 0;
};

}  // namespace torch_ort::passes
