// The contract of a torch_ort.Region node: the rows and columns of its elements, and the space of
// each operand. Code that makes, reads or changes a region uses these functions.
#pragma once

#include "ir/graph.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_ort::region {

// The elements of a region are arranged in rows and columns. A value is one number, or has a number
// for each column, for each row, or for each element.
enum class Space : uint8_t {
  kScalar,
  kColumn,
  kRow,
  kFull,
  // The result of a sum over rows, over the rows of each group, or over everything; or of a
  // concatenation. It is an output of the region.
  kTotal,
  kTable,  // an operand whose rows are looked up
  // An operand of integers that select a row of the table for each row of the region.
  kIds,
};

const char* name(Space space);  // the name in attributes, such as "row"

struct RegionSpec {
  std::shared_ptr<ir::Graph> body;  // of ops that ops/fusion.h describes
  ir::Dim rows = 1, columns = 1;
  std::vector<Space> spaces;  // by input of the body
  // The node has one more input after those of its body: the list of the rows to compute
  // (cpu/rows.h). Other rows of its results are unspecified, and sums over rows leave them out.
  bool has_row_list = false;
};

// Throws InternalError if the node is not a region.
RegionSpec read(const ir::Node& region);
void write(const RegionSpec& spec, ir::Attrs& attrs);

}  // namespace torch_ort::region
