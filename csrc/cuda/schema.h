// From sizes to the shape of a kernel: how many threads stand along a row, how many rows a block
// has, what a thread reads at once and what stays in its registers. It looks at no device, so that
// sums are taken in the same order on every GPU.
#pragma once

#include <cstdint>

namespace torch_ort::cuda {

// What a kernel has to do.
struct Work {
  int64_t rows = 0, columns = 0;
  int64_t groups = 1;         // of rows, each with sums of its own
  bool reduces_rows = false;  // a row's numbers are known to one block
  bool sums_columns = false;  // over rows, one for each column
  bool sums_all = false;
  int vector = 1;  // elements that lie where one access reads them, at most
  // Values of columns that stay in registers: from one pass to a later one, for all rows of a
  // block, and sums over these.
  int kept = 0;
  int bytes_of_number = 4;  // in which it computes
};

// A block has threads_y lines of threads_x threads. A thread has `vectors` vectors of `vector`
// columns, threads_x vectors apart; where `vectors` is 0 it goes along the row and reads it once
// for each pass. A row is cut into strips for different blocks where none is reduced.
struct Geometry {
  int threads_x = 1, threads_y = 1;
  int vector = 1, vectors = 1;
  int64_t strips = 1;
  int64_t rows_per_block = 1, blocks_per_group = 1;
  bool has_tail = false;  // the last vector of a row may be a part of one

  // Numbers that stand in the text; others are arguments.
  bool loops() const { return vectors == 0; }
};

Geometry choose_geometry(const Work& work);

}  // namespace torch_ort::cuda
