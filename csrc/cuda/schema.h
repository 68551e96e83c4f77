// Chooses the geometry of a kernel from sizes: how many threads share a row, how many rows a block
// has, how many elements a thread reads at once, and what stays in registers. It does not look at
// the device, so that sums have the same order on every GPU.
#pragma once

#include <cstdint>

namespace torch_ort::cuda {

// The work of a kernel.
struct Work {
  int64_t rows = 0, columns = 0;
  int64_t groups = 1;         // of rows; each group has its own sums
  bool reduces_rows = false;  // there are reductions along rows
  bool sums_columns = false;  // there are sums over rows, one for each column
  bool sums_all = false;
  // How many elements one access can read at most.
  int vector = 1;
  // Each row begins so many elements further into a vector than the row before it. If there are
  // sums over rows, it is 0.
  int shift = 0;
  // The bytes of each column that stay in registers: from one pass to a later one, for all rows of
  // a block, and as sums over rows.
  int kept_bytes = 0;
  int bytes_of_number = 4;  // of the dtype in which it computes
};

// A block has threads_y rows of threads_x threads. A thread has `vectors` vectors of `vector`
// columns, which are threads_x vectors apart. If it loops, these are those of one step, and it goes
// over the whole row in each pass. Strips divide a row among several blocks.
struct Geometry {
  int threads_x = 1, threads_y = 1;
  int vector = 1, vectors = 1;
  bool loops = false;
  int64_t strips = 1;
  int64_t rows_per_block = 1, blocks_per_group = 1;
  // Whether rows are divided into strips although there are reductions along them. Then each pass
  // is a kernel of its own, whose blocks reduce their strips.
  bool is_split = false;
  int64_t columns_per_strip = 1;
  bool has_tail = false;  // the last vector of a row may be incomplete
  // As in Work. If it is not 0, the first vector of a row may be incomplete, too.
  int shift = 0;

  // The columns that the threads of a row have at once.
  int64_t width() const { return int64_t{threads_x} * vector * vectors; }
};

Geometry choose_geometry(const Work& work);

}  // namespace torch_ort::cuda
