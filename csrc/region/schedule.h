// The order of work in a region, as far as it is the same for all sizes. Code generators follow it,
// and the planner asks it which operands may be overwritten.
//
// A region has one schedule, made with the session from symbols alone, so that the planner and the
// generators cannot disagree on what may be overwritten. The compiler of tile programs checks each
// program against it, and under TORCH_ORT_CHECK=2 the schedules of all regions are made after each
// pass.
#pragma once

#include "ops/fusion.h"
#include "region/contract.h"

#include <string_view>
#include <vector>

namespace torch_ort::region {

// A phase is the work between two reductions along rows. A generator whose tile does not hold a
// whole row passes over the columns once for each phase.
struct Schedule {
  enum class Axes : uint8_t { kNone, kAll, kColumns, kRows };

  struct Step {
    const ir::Node* node = nullptr;
    ops::FusedForm form;
    // The space in which the result is computed, which may be smaller than its shape.
    Space space = Space::kFull;
    int phase = 0;  // the phase in which it runs
    // The first phase that may read the result. For a reduction this is a later phase.
    int known_in = 0;
    Axes axes = Axes::kNone;       // for a reduction
    Space reduced = Space::kFull;  // for a reduction: the space of its input, full or row
    // Whether a later phase may recompute the result instead of keeping it: it is a sum or product
    // of one full input and of numbers for rows or columns.
    bool is_remade = false;
    // The result is a short float that is rounded to its dtype (region/rounded.h).
    bool is_rounded = false;
  };

  struct Stretch {
    ir::Shape shape;  // the shape that the input is broadcast to; empty: none
    // How many of the input's last dims, all of size 1, `shape` does not have.
    int num_column_dims = 0;
  };

  RegionSpec spec;
  ir::Dim groups = 1;              // of rows; each group has its own sums over rows
  std::vector<Stretch> stretched;  // by input
  std::vector<Step> steps;         // in the order of the body
  // Inputs that are not read any more, except element by element, once the first output is written.
  // The output may use their memory if it has the same layout.
  std::vector<int> overwritable;
};

// Makes the schedule of a region. Throws InternalError if the body does not agree with the node's
// rows, columns and spaces, and Unsupported for a node that regions cannot contain.
Schedule make_schedule(const ir::Node& region);

// Makes the schedule of every region in the graph and its bodies. Throws InternalError if one has
// none, contains a node that regions cannot contain, or is for operands of other types. The types
// of all values have to be known. `stage` goes into the message, as for ir::verify.
void verify(const ir::Graph& graph, std::string_view stage);
// The same for a graph from a file: throws UserError, and the message begins with "file: ".
void check_file(const ir::Graph& graph);

}  // namespace torch_ort::region
