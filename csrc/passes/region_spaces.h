// Whether nodes can stand in one fused region, and as what the region sees each value.
#pragma once

#include "ir/graph.h"
#include "ops/fusion.h"

#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::passes {

// As cpu/region.h explains them. kTotal: a sum over rows or over everything, or parts side by side;
// it leaves the region. kTable: rows of it are looked up. kIds: they name one for each row.
enum class Space { kScalar, kColumn, kRow, kFull, kTotal, kTable, kIds };

const char* name(Space space);

struct FusibleNode {
  ir::Node* node = nullptr;
  ops::FusedForm form;
};

// A value from outside, as one of its readers sees it.
struct RegionInput {
  ir::Value* value = nullptr;
  Space space = Space::kFull;
  ir::Shape shape;  // against which a broadcast full or row input is stretched; else empty

  bool operator==(const RegionInput& other) const = default;
};

// How the elements of a group fall into rows and columns.
struct RegionSpaces {
  ir::Dim rows, columns;
  std::unordered_map<const ir::Value*, Space> made;  // by members
  std::vector<RegionInput> inputs;                   // each once
  // For each member and each of its operands: which input it is; -1: a member made it, or it is no
  // operand.
  std::vector<std::vector<int>> operands;
};

// Values whose sizes are known when a call begins: from the shapes of the inputs, not from data.
class KnownSizes {
 public:
  explicit KnownSizes(const ir::Graph& graph);
  bool are_known(const ir::Value& value) const;
  bool is_known(const ir::Dim& dim) const;

 private:
  std::unordered_set<std::string> symbols_;
};

// Floating-point numbers on the CPU, of a shape that is known: what kernels of ours work on.
bool is_real(const ir::Value* value);

// The numbers of columns that a node allows: products of the last dims of what it works on.
std::vector<ir::Dim> possible_columns(const FusibleNode& node);
// Elements of what it works on: of its input for a reduction, of its result otherwise.
ir::Dim num_elements(const FusibleNode& node);

// Nothing if the nodes, in order, do not fit together in that way.
std::optional<RegionSpaces> find_spaces(const std::vector<FusibleNode>& nodes,
                                        const ir::Dim& elements, const ir::Dim& columns);

}  // namespace torch_ort::passes
