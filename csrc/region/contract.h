// What a torch_ort.Region node says: which rows and columns its elements stand in, and as what its
// body sees each operand. Whoever makes, reads or changes a region does it through here.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::region {

// The elements of a region stand in rows and columns. A value is one number, has one for each
// column or for each row, or one for each row and column.
enum class Space : uint8_t {
  kScalar,
  kColumn,
  kRow,
  kFull,
  kTotal,  // sums over rows, of each group of them, or over everything, or parts side by side; it
           // leaves the region
  kTable,  // an operand of which rows are looked up
  kIds,    // an operand that names one of them for each row
};

const char* name(Space space);  // "row", as attributes hold it

struct RegionSpec {
  std::shared_ptr<ir::Graph> body;  // of the language that ops/fusion.h tells
  ir::Dim rows = 1, columns = 1;
  std::vector<Space> spaces;  // by input of the body
  // The node has one more input, behind those of its body: the rows that count (ops/rows.h). What
  // other rows of its results hold is not said, and sums over rows leave them out.
  bool has_row_list = false;
};

// InternalError if the node is no region.
RegionSpec read(const ir::Node& region);
void write(const RegionSpec& spec, ir::Attrs& attrs);

}  // namespace torch_ort::region
