// Arranges the elements of nodes in rows and columns. This is the only place that decides it:
// passes ask about nodes that might share a region, the schedule and the verifier about the nodes
// of a body.
#pragma once

#include "ir/graph.h"
#include "ops/fusion.h"
#include "region/contract.h"

#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_ort::region {

struct Member {
  ir::Node* node = nullptr;
  ops::FusedForm form;
};

// A value from outside of the group, as one of its readers sees it.
struct Operand {
  ir::Value* value = nullptr;
  Space space = Space::kFull;
  // The shape to which a full or row operand is broadcast; empty: none.
  ir::Shape shape;
  // How many of its last dims stand against columns, if `shape` has only rows.
  int num_column_dims = 0;
  // Whether it is full and broadcast along some of the dims that make columns, and not along
  // others, so that its elements are read one by one.
  bool splits_columns = false;

  bool operator==(const Operand& other) const = default;
};

// The arrangement of a group of nodes.
struct Spaces {
  ir::Dim rows, columns;
  // Sums over rows are computed for each of this many groups of consecutive rows.
  ir::Dim groups = 1;
  std::unordered_map<const ir::Value*, Space> made;  // of the results of members
  std::vector<Operand> operands;                     // each once
  // For each member and each of its inputs: the index of the operand. -1: a member produces the
  // input, or it is not a tensor operand.
  std::vector<std::vector<int>> operand_of;
};

// The numbers of columns that a node allows: the products of the last dims of what it works on.
std::vector<ir::Dim> possible_columns(const Member& member);
// The number of elements that a node works on: those of its input for a reduction, of its result
// otherwise.
ir::Dim num_elements(const Member& member);

// Arranges the members in so many columns. Returns nothing if they do not fit together.
std::optional<Spaces> find_spaces(const std::vector<Member>& members, const ir::Dim& elements,
                                  const ir::Dim& columns);

// The nodes of a body that work on elements, in order. Throws Unsupported for a node that regions
// cannot contain.
std::vector<Member> members_of(const RegionSpec& spec);
// The same for the body of a region. Throws InternalError if its nodes do not fit the rows and
// columns of `spec`, or if an input is read in another space than `spec` says.
Spaces find_spaces(const RegionSpec& spec, const std::vector<Member>& members);

}  // namespace torch_ort::region
