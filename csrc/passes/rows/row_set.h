// Sets of rows, and the conditions that define them.
//
// A set is a union of atoms. If a union or an intersection of two sets cannot be expressed so, a
// larger set replaces it: it is always correct to compute more rows.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <vector>

namespace torch_ort::passes::rows {

// A condition that selects rows: a label that is not the ignored one, a key that a mask shows, or
// one position of each sequence.
struct Atom {
  enum class Kind : uint8_t { kLabels, kMask, kPlace } kind = Kind::kPlace;
  ir::Value* source = nullptr;
  int64_t ignored = 0, place = 0;
  bool is_causal = false;
  bool operator==(const Atom& other) const = default;
};

class RowSet {
 public:
  static constexpr size_t kMostAtoms = 64;

  static RowSet none() { return {}; }
  static RowSet all() { return RowSet(true, 0, false); }
  static RowSet atom(size_t index) { return RowSet(false, uint64_t{1} << index, false); }

  bool is_all() const { return is_all_; }
  bool is_none() const { return !is_all_ && atoms_ == 0; }
  bool has_atom(size_t index) const { return (atoms_ >> index & 1) != 0; }
  bool is_closed() const { return is_closed_; }

  // The set with all rows of a sequence before the last one that is in it.
  RowSet closed() const { return is_all_ || is_none() ? *this : RowSet(false, atoms_, true); }
  bool contains(const RowSet& other) const {
    if (is_all_ || other.is_none()) return true;
    return !other.is_all_ && (other.atoms_ & ~atoms_) == 0 && (is_closed_ || !other.is_closed_);
  }
  bool operator==(const RowSet& other) const = default;
  auto operator<=>(const RowSet& other) const = default;

  friend RowSet unite(const RowSet& a, const RowSet& b) {
    if (a.is_all_ || b.is_all_) return all();
    return RowSet(false, a.atoms_ | b.atoms_, a.is_closed_ || b.is_closed_);
  }
  // A set that contains all rows that are in both. If one of the two contains the other, it is the
  // smaller one.
  friend RowSet intersect(const RowSet& a, const RowSet& b) { return b.contains(a) ? a : b; }

 private:
  RowSet() = default;
  RowSet(bool is_all, uint64_t atoms, bool is_closed)
      : is_all_(is_all), is_closed_(is_closed), atoms_(atoms) {}

  bool is_all_ = false, is_closed_ = false;
  uint64_t atoms_ = 0;
};

inline RowSet unite(const std::vector<RowSet>& sets) {
  RowSet all = RowSet::none();
  for (const RowSet& set : sets) all = unite(all, set);
  return all;
}

}  // namespace torch_ort::passes::rows
