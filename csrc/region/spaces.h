// How the elements of nodes fall into rows and columns. The only place that tells: passes ask it of
// nodes that could stand in one region, the schedule and the verifier of the nodes of a body.
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

// A value from outside, as one of its readers sees it.
struct Operand {
  ir::Value* value = nullptr;
  Space space = Space::kFull;
  ir::Shape shape;  // against which a broadcast full or row operand is stretched; else empty
  int num_column_dims = 0;  // last dims that stand against columns, where `shape` has rows alone

  bool operator==(const Operand& other) const = default;
};

// How the elements of a group of nodes fall into rows and columns.
struct Spaces {
  ir::Dim rows, columns;
  // Sums over rows are taken for each of so many groups of rows, which lie one after the other.
  ir::Dim groups = 1;
  std::unordered_map<const ir::Value*, Space> made;  // by members
  std::vector<Operand> operands;                     // each once
  // For each member and each of its inputs: which operand it is; -1: a member made it, or it is
  // none.
  std::vector<std::vector<int>> operand_of;
};

// The numbers of columns that a node allows: products of the last dims of what it works on.
std::vector<ir::Dim> possible_columns(const Member& member);
// Elements of what it works on: of its input for a reduction, of its result otherwise.
ir::Dim num_elements(const Member& member);

// Nothing if the members, in order, do not fit together in that way.
std::optional<Spaces> find_spaces(const std::vector<Member>& members, const ir::Dim& elements,
                                  const ir::Dim& columns);

// Those nodes of a body that work on elements, in order. InternalError for one that is not of the
// language.
std::vector<Member> members_of(const RegionSpec& spec);
// InternalError if they do not fit together in the rows and columns of `spec`, or if an input is
// read as something else than it says.
Spaces find_spaces(const RegionSpec& spec, const std::vector<Member>& members);

}  // namespace torch_ort::region
