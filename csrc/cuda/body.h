// The body of a region as a kernel computes it: values in the order in which they are made, and
// which of them each pass over the columns of a row needs.
//
// A pass ends where sums or extremes along the row are known. All that leaves element by element is
// written in the last pass, after the element has been read everywhere: so an output may lie where
// an operand lay.
#pragma once

#include "ops/fusion.h"
#include "region/bound_schedule.h"

#include <string>
#include <vector>

namespace torch_ort::cuda {

using region::Access;
using region::Space;

struct Value {
  enum class Kind : uint8_t {
    kConstant,   // `number`
    kRatio,      // a number that sizes make: `number` now
    kColumns,    // how many columns there are
    kInput,      // of region `input`
    kGather,     // the row of table `input` that input `ids` names
    kPointwise,  // `op` over `operands`
    kReduced,    // what a pass over the columns makes of `operands[0]`: `reduction`
    kScatter,    // `operands[1]` in the column that label `operands[0]` names, else 0
    kRandom,     // 1 with a probability, else 0; the seed is input `input`
  } kind = Kind::kConstant;
  Space space = Space::kScalar;
  int known_in = 0;  // the first pass that may read it
  ops::Pointwise op = ops::Pointwise::kCopy;
  std::vector<int> operands = {};
  int input = -1, ids = -1;
  double number = 0;
  enum class Reduction : uint8_t { kSum, kMax, kMin, kPick } reduction = Reduction::kSum;
  bool has_ignored = false;  // of kPick, whose operands[1] is the label, and of kScatter
  int64_t ignored = 0;
  int64_t stream = 0;  // of kRandom
  double keep = 1;
  std::string origin = {};  // the node that it comes from, for readers
};

// A value that leaves, as one of the kernel's own outputs.
struct Store {
  int value;
  Access to;
  bool is_full;  // else one number for each row
};

// A sum over rows.
struct RowsSum {
  int value;
  bool is_total;    // over the columns as well
  bool is_of_rows;  // of one number for each row
  Access to;        // groups, and columns if it is not total
};

struct Body {
  std::vector<Value> values;
  std::vector<Store> stores;
  std::vector<RowsSum> sums;
  std::vector<Access> inputs;                          // of the region
  std::vector<std::string> input_names, output_names;  // for readers
  int last_pass = 0;

  bool reduces_rows() const;
  // Full values and those of columns that a pass reads, each after its operands; not those that are
  // in `kept`, by value.
  std::vector<int> needed_in(int pass, const std::vector<bool>& kept) const;
  // Full values that an earlier pass than the last that reads them makes, by value.
  std::vector<bool> read_again() const;
  // What the columns of a row make in a pass.
  std::vector<int> reductions_of(int pass) const;
};

// `round_short_floats` as region::CodegenOptions has it. Unsupported for a mask of columns.
Body make_body(const region::BoundSchedule& bound, bool round_short_floats);

}  // namespace torch_ort::cuda
