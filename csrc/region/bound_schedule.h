// A schedule over one set of sizes and strides: how many rows and columns there are, and where each
// operand has its elements. Generators of code begin here.
#pragma once

#include "region/codegen.h"

#include <cstdint>
#include <string>
#include <vector>

namespace torch_ort::region {

// How the elements of an operand are found from row and column. Dims that lie one after the other
// in memory are merged.
struct Access {
  ir::DType dtype = ir::DType::kUndefined;
  struct Axis {
    int64_t size, stride;
  };
  std::vector<Axis> rows, columns;
  int result = -1;    // output of the node that it is, or is a part of
  int64_t begin = 0;  // its first element there

  int64_t row_offset(int64_t row) const;  // in elements, from the first one of the operand
  bool is_grid() const { return rows.size() == 1 && columns.size() == 1; }
  bool is_one_run() const { return columns.size() == 1 && columns[0].stride == 1; }
  // Whether groups of rows, which lie one after the other, have the same columns.
  bool repeats_rows() const {
    return rows.size() > 1 && rows.back().stride == 0 && columns.size() == 1;
  }
};

// Whether the elements lie one after the other, the last dim first.
bool lies_by_rows(const Layout& layout);
// InternalError if no dims of a full operand make the columns.
Access access_of(const Layout& layout, Space space, int64_t num_columns);

int64_t num_elements(const Layout& layout);

struct BoundSchedule {
  // Unsupported for an operand that `can_load` refuses, InternalError on layouts that do not fit.
  BoundSchedule(const Schedule& schedule, const ir::SymbolLookup& lookup,
                const std::vector<Layout>& input_layouts, const std::vector<Layout>& output_layouts,
                bool (*can_load)(ir::DType));

  int64_t evaluate(const ir::Dim& dim) const;  // InternalError if a symbol in it has no value
  double evaluate(const ops::SizeRatio& ratio) const;

  int64_t rows_of_group() const;
  bool is_full_size(const std::vector<int64_t>& sizes) const;
  // Which input of the body the operand of a node is. InternalError if it is none.
  int input_index(const ir::Node& node, size_t slot) const;
  // Of an operand whose elements are those of its space, no more and no fewer.
  Access checked_access(const Layout& layout, Space space) const;
  // Of sums over rows: one for each group, or as many as there are columns.
  Access sums_access(const Layout& layout, int64_t size) const;

  // What an output of the body leaves as: itself, or one part after the other of a Concat.
  struct Leaving {
    const ir::Value* value;
    Layout layout;
    int64_t begin;  // of the part in the whole, in elements
  };
  std::vector<Leaving> leaving(size_t output) const;

  const Schedule& schedule;
  const ir::Graph& body;
  const ir::SymbolLookup& lookup;
  const std::vector<Layout>&input_layouts, &output_layouts;
  int64_t num_rows = 0, num_columns = 0;
  int64_t num_groups = 1;  // of rows, each with sums of its own
  bool is_double = false;  // whether it computes in float64
  std::vector<Access>
      inputs;  // by input of the body; of a table, one row of it for each of its own

 private:
  bool is_flat() const;
  Access input_access(size_t input) const;
  Access table_access(Layout layout) const;
  Layout stretched(size_t input) const;
  std::vector<int64_t> evaluate(const ir::Shape& shape) const;

  bool (*can_load_)(ir::DType);
};

}  // namespace torch_ort::region
