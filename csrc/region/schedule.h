// What a region does and in which order, as far as its symbols tell. A generator of code follows
// it, and the planner asks it what may be written over: both see the same reads.
#pragma once

#include "ops/fusion.h"
#include "region/contract.h"

#include <string_view>
#include <vector>

namespace torch_ort::region {

// A phase is what lies between two reductions along rows. A generator whose tile does not hold a
// whole row goes over its columns once for each phase.
struct Schedule {
  enum class Axes : uint8_t { kNone, kAll, kColumns, kRows };

  struct Step {
    const ir::Node* node = nullptr;
    ops::FusedForm form;
    Space space = Space::kFull;  // of the result as it is computed: less than its shape, maybe
    int phase = 0;               // in which it runs
    int known_in = 0;            // the first phase that may read the result; a reduction's is later
    Axes axes = Axes::kNone;     // of a reduction
    Space reduced = Space::kFull;  // what a reduction takes, by its shape: full or row
    // Whether a later phase may compute the result again and not keep it: a sum or product of one
    // full input and of numbers that belong to rows or columns.
    bool is_remade = false;
  };

  struct Stretch {
    ir::Shape shape;          // that the input is broadcast to; empty: it is not
    int num_column_dims = 0;  // the last dims of the input, all one, that `shape` has not
  };

  RegionSpec spec;
  ir::Dim groups = 1;              // of rows, each with sums over rows of its own
  std::vector<Stretch> stretched;  // by input
  std::vector<Step> steps;         // in the order of the body
  // Inputs that lie under no other read once the first output is written, element by element: their
  // memory may be that of the output, if it has the same layout.
  std::vector<int> overwritable;
};

// InternalError where node and body do not fit, or where the body does not stand in the rows,
// columns and spaces that the node says. Unsupported for a node that is not of the language.
Schedule make_schedule(const ir::Node& region);

// InternalError for a region in the graph, or in a body in it, that has no schedule, or whose body
// is for operands of other types. The types of all values are known. `stage` goes into the message,
// as that of ir::verify.
void verify(const ir::Graph& graph, std::string_view stage);
// The same for a graph from a file: UserError, and "file: " in front.
void check_file(const ir::Graph& graph);

}  // namespace torch_ort::region
