// How threads divide a matrix that is computed; internal to cpu/.
#pragma once

#include "base/rounding.h"

#include <algorithm>
#include <cstdint>

namespace torch_ort::cpu {

// A part of a matrix, from its first row and column on.
struct Rectangle {
  int64_t row, rows, column, columns;
};

// Divides a result among threads into parts that take equally long. Each thread reads the rows and
// columns of its part, so parts should also be close to squares. Threads often read what another
// thread has written, which takes as long as several multiplications.
struct Grid {
  int64_t rows = 1, columns = 1;  // the numbers of parts
  int64_t part_rows = 0, part_columns = 0;

  // `most_rows`: into how many parts the rows are divided at most.
  Grid(int64_t m, int64_t n, int64_t threads, int64_t most_rows, int64_t tile_rows,
       int64_t tile_columns)
      : m_(m), n_(n) {
    int64_t least = -1;
    for (int64_t parts = 1; parts <= std::min(threads, most_rows); ++parts) {
      const int64_t height = ceil_div(m, parts);
      const int64_t width = round_up(ceil_div(n, threads / parts), tile_columns);
      // For each step of the sums: a thread's multiplications, and the numbers that it reads.
      const int64_t cost = whole_rows(height, tile_rows) * width + kReadCost * (height + width);
      if (least >= 0 && cost >= least) continue;
      least = cost;
      part_rows = height;
      part_columns = width;
    }
    rows = ceil_div(m, part_rows);
    columns = ceil_div(n, part_columns);
  }

  int64_t num_parts() const { return rows * columns; }
  Rectangle part(int64_t i) const {
    const int64_t row = i / columns * part_rows, column = i % columns * part_columns;
    return {row, std::min(part_rows, m_ - row), column, std::min(part_columns, n_ - column)};
  }

 private:
  // So many multiplications take as long as reading a number that another thread has written.
  static constexpr int64_t kReadCost = 16;

  // The number of rows of whole tiles that take as long. A tile of fewer than four rows takes as
  // long as one of four, since its sums wait for their last additions.
  static int64_t whole_rows(int64_t height, int64_t tile_rows) {
    const int64_t rest = height % tile_rows;
    return rest == 0 ? height : height - rest + std::max<int64_t>(rest, 4);
  }

  int64_t m_, n_;
};

// The size of blocks of which each has about as many of `all`, and at most `most`. It is a multiple
// of `unit`.
inline int64_t even_part(int64_t all, int64_t most, int64_t unit) {
  const int64_t blocks = std::max<int64_t>(1, ceil_div(all, most));
  return std::max(unit, round_up(ceil_div(all, blocks), unit));
}

}  // namespace torch_ort::cpu
