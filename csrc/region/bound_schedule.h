// A schedule with known sizes and strides: how many rows and columns there are, and where the
// elements of each operand are. Code generators start from it.
#pragma once

#include "region/codegen.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::region {

// How to find an operand's element from its row and column. Dims that are contiguous with one
// another are merged into one axis.
struct Access {
  ir::DType dtype = ir::DType::kUndefined;
  struct Axis {
    int64_t size, stride;
  };
  std::vector<Axis> rows, columns;
  // The output of the region node that this is, or is a part of. -1: it is an input.
  int result = -1;
  int64_t begin = 0;  // the index of its first element there

  int64_t row_offset(int64_t row) const;        // in elements, from the operand's first element
  int64_t column_offset(int64_t column) const;  // from the first element of a row
  // The offsets of all columns; empty if they are contiguous.
  std::vector<int64_t> scattered_columns(int64_t num_columns) const;
  bool is_grid() const { return rows.size() == 1 && columns.size() == 1; }
  bool is_one_run() const { return columns.size() == 1 && columns[0].stride == 1; }
  // Whether the operand has one row for each group of consecutive rows.
  bool repeats_rows() const {
    return rows.size() > 1 && rows.back().stride == 0 && columns.size() == 1;
  }
};

// Whether the layout is contiguous in row-major order.
bool lies_by_rows(const Layout& layout);
// How to access an operand of the space. Throws InternalError if the columns of a full operand are
// not the product of its last dims.
Access access_of(const Layout& layout, Space space, int64_t num_columns);

int64_t num_elements(const Layout& layout);

struct BoundSchedule {
  // Throws Unsupported for an operand whose dtype `can_load` refuses, and InternalError on layouts
  // that do not fit the schedule.
  BoundSchedule(const Schedule& schedule, const ir::SymbolLookup& lookup,
                const std::vector<Layout>& input_layouts, const std::vector<Layout>& output_layouts,
                bool (*can_load)(ir::DType));

  int64_t evaluate(const ir::Dim& dim) const;  // InternalError if a symbol has no value
  double evaluate(const ops::SizeRatio& ratio) const;

  int64_t rows_of_group() const;
  bool is_full_size(const std::vector<int64_t>& sizes) const;
  // The input of the body that the node reads in `slot`. Throws InternalError if it reads none
  // there.
  int input_index(const ir::Node& node, size_t slot) const;
  // As access_of(), for an operand that has exactly the elements of its space. InternalError
  // otherwise.
  Access checked_access(const Layout& layout, Space space) const;
  // The access of sums over rows, which have one number for each group of rows or as many as there
  // are columns.
  Access sums_access(const Layout& layout, int64_t size) const;

  // What an output of the body is written to: the output of the node, or, for a Concat, one part of
  // it.
  struct OutputPart {
    const ir::Value* value;
    Layout layout;
    int64_t begin;  // of the part in the output, in elements
  };
  std::vector<OutputPart> parts_of_output(size_t output) const;

  const Schedule& schedule;
  const ir::Graph& body;
  const ir::SymbolLookup& lookup;
  const std::vector<Layout>&input_layouts, &output_layouts;
  int64_t num_rows = 0, num_columns = 0;
  int64_t num_groups = 1;  // of rows; each group has its own sums
  bool is_double = false;  // whether the region computes in float64
  // By input of the body. For a table: one row of the table for each row of the region.
  std::vector<Access> inputs;

 private:
  bool is_flat() const;
  Access input_access(size_t input) const;
  Access table_access(Layout layout) const;
  Layout stretched(size_t input) const;
  std::vector<int64_t> evaluate(const ir::Shape& shape) const;

  bool (*can_load_)(ir::DType);
};

}  // namespace torch_ort::region
