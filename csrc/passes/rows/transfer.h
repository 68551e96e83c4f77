// What the nodes of an op do to rows.
#pragma once

#include "ops/words.h"
#include "passes/rows/analysis.h"

#include <span>
#include <string_view>
#include <vector>

namespace torch_ort::passes::rows {

class Rewriter;

// The nonzero rows of what a word gives, from those of its operands; constants are the last ones.
RowSet nonzero_of_word(ops::Pointwise op, std::vector<RowSet> operands,
                       const std::vector<double>& constants);
// The rows whose label is not the ignored one; all rows if the labels are not integers of rows.
RowSet labelled(Analysis& rows, ir::Value* labels, int64_t ignored);

// For views, for ops that compute each element by itself, and for all others.
void nonzero_of_others(Analysis& rows, ir::Node& node);
void needed_of_others(Analysis& rows, ir::Node& node);

struct Transfer {
  std::string_view op;  // with its domain, or the operator of an ATen node
  // Which nodes of the op it is for, nullptr: all of them. Others are as those of ops without a
  // row.
  bool (*is_for)(Analysis& rows, const ir::Node& node) = nullptr;
  // Sets the forms and nonzero rows of the results, from those of the inputs.
  void (*find_nonzero)(Analysis& rows, ir::Node& node) = nonzero_of_others;
  // Sets the rows that the node computes, and says which rows of the inputs it needs for them.
  void (*find_needed)(Analysis& rows, ir::Node& node) = needed_of_others;
  // Gives lists to a node that computes some rows alone.
  void (*give_lists)(Rewriter& rewriter, ir::Node& node, const Work& work) = nullptr;
};

// By family; each is in the file of its name.
std::span<const Transfer> of_attention();
std::span<const Transfer> of_products();
std::span<const Transfer> of_regions();
std::span<const Transfer> of_views();

const Transfer& transfer_of(Analysis& rows, const ir::Node& node);
// That of the op, whether it is for the node or not.
const Transfer& transfer_of(const ir::Node& node);

}  // namespace torch_ort::passes::rows
