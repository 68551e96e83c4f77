// The body of a region as a CUDA kernel computes it: values in the order of their computation, and
// which of them each pass over the columns of a row needs.
//
// A pass ends where sums or extremes along the row become known. The last pass writes all results
// that have a number for each element, after every read of that element, so that an output may
// overwrite an operand.
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
    kRatio,      // a number that depends on sizes; now `number`
    kColumns,    // the number of columns
    kInput,      // of region `input`
    kGather,     // the row of table `input` that input `ids` selects
    kPointwise,  // `op` over `operands`
    kReduced,    // the `reduction` of `operands[0]` over the columns
    kScatter,    // `operands[1]` in column `operands[0]`, else 0
    kRandom,     // 1 with probability `keep`, else 0; the seed is `input`
  } kind = Kind::kConstant;
  Space space = Space::kScalar;
  int known_in = 0;  // the first pass that may read it
  ops::Pointwise op = ops::Pointwise::kCopy;
  std::vector<int> operands = {};
  int input = -1, ids = -1;
  double number = 0;
  enum class Reduction : uint8_t { kSum, kMax, kMin, kPick } reduction = Reduction::kSum;
  // Of kPick, whose operands[1] is the label, and of kScatter.
  bool has_ignored = false;
  int64_t ignored = 0;
  int64_t stream = 0;  // of kRandom
  double keep = 1;
  std::string origin = {};  // the name of its node, for listings
};

// A value that the kernel writes to an output.
struct Store {
  int value;
  Access to;
  bool is_full;  // otherwise one number for each row
};

// A sum over rows.
struct RowsSum {
  int value;
  bool is_total;    // summed over the columns as well
  bool is_of_rows;  // the value has one number for each row
  Access to;        // groups, and columns unless it is total
};

struct Body {
  std::vector<Value> values;
  std::vector<Store> stores;
  std::vector<RowsSum> sums;
  std::vector<Access> inputs;                          // of the region
  std::vector<std::string> input_names, output_names;  // for listings
  int last_pass = 0;

  bool reduces_rows() const;
  int64_t num_column_sums() const;  // sums over rows that are not totals
  // The full and column values that a pass computes, each after its operands. Values in `kept`,
  // which is indexed by value, are left out.
  std::vector<int> needed_in(int pass, const std::vector<bool>& kept) const;
  // By value: whether it is a full value that a pass computes and a later pass reads again. Those
  // that take one plain operation to compute again are left out.
  std::vector<bool> read_again() const;
  // The reductions along the row that a pass computes.
  std::vector<int> reductions_of(int pass) const;
  // The sum along the row of the exponentials of what the value is the largest of, less that; -1 if
  // there is none.
  int sum_of_exponentials(int largest) const;
  // Whether the value is a reduction to which only the column of a label adds anything.
  bool is_at_label(int reduced) const;
  // Whether the value is read from memory, where it has the dtype of an operand.
  static bool is_read(const Value& value) {
    return value.kind == Value::Kind::kInput || value.kind == Value::Kind::kGather;
  }
  // The bytes that an element of the value takes in registers: as many as in memory if it is read
  // from there, otherwise `bytes_of_number`.
  int bytes_in_registers(const Value& value, int bytes_of_number) const;

 private:
  bool is_made_quickly(const Value& value, const std::vector<bool>& kept) const;
};

// Makes the body of a bound region. `round_short_floats` is that of region::CodegenOptions. Throws
// Unsupported for a random mask of columns.
Body make_body(const region::BoundSchedule& bound, bool round_short_floats);

}  // namespace torch_ort::cuda
