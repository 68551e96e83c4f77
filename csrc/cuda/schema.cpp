#include "cuda/schema.h"

#include "base/error.h"
#include "base/rounding.h"

#include <algorithm>
#include <bit>

namespace torch_ort::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;      // of a block, unless a row needs more
constexpr int kMostThreads = 512;  // along a row
constexpr int kMostVectors = 8;    // of a thread in registers
// Of a step of a loop. With two, enough memory accesses are under way although long rows have few
// threads. Sums of columns, which lie in memory then, are accesses themselves, and need registers.
constexpr int kVectorsOfStep = 2, kVectorsOfSummedStep = 1;
constexpr int kKeptBytes = 448;    // of a thread at most: 112 of the 128 registers that it may have
constexpr int kUsualBytes = 256;   // of a thread, unless a row would need too many threads
constexpr int kStripThreads = 32;  // along a row that is cut into strips and summed over rows
// At least so many rows are summed into one line of partial sums, which costs one write and one
// read; fewer where that would leave less than so many blocks. With at most so many rows for a
// thread, rounding errors stay small.
constexpr int64_t kRowsPerSum = 32, kFewestRowsPerSum = 4, kBlocksOfSums = 256;
constexpr int64_t kMostRowsPerThread = 256;
constexpr int64_t kBlocksWanted = 1024;   // about eight for each multiprocessor of a large GPU
constexpr int64_t kRowsOfPlainBlock = 4;  // for each line of threads, if nothing is summed
// With so few rows of so many columns, one block for each would leave most of a GPU idle for longer
// than it takes to start a kernel for each pass.
constexpr int64_t kFewRows = 64, kManyColumns = 65536;
constexpr int64_t kBlocksOfSplitRows = 512;  // in all

int power_of_two(int64_t at_least, int most) {
  const auto wanted = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, at_least)));
  return static_cast<int>(std::min<uint64_t>(wanted, static_cast<uint64_t>(most)));
}

// Threads across rows: at most as many as there are rows, but whole warps, since the threads of a
// warp exchange numbers.
int lines(const Work& work, int threads_x) {
  const int most = std::max(1, kThreads / threads_x);
  return std::max(power_of_two(work.rows, most), std::min(most, kWarp / threads_x));
}

// The most vectors that a row has elements in.
int64_t vectors_of_row(const Work& work) {
  return ceil_div(work.columns + (work.shift > 0 ? work.vector - 1 : 0), work.vector);
}

// A block gets whole rows, with few threads that have many vectors each, as far as registers allow
// it. If threads keep many numbers in registers, few of them run at once on a multiprocessor, and
// too few memory accesses are under way. Only long rows are worth that.
void choose_whole_rows(const Work& work, Geometry& result) {
  const int64_t vectors = vectors_of_row(work);
  const int bytes = std::max(work.bytes_of_number, work.kept_bytes) * result.vector;
  const auto vectors_in = [bytes](int room, int limit) {
    return std::clamp(static_cast<int>(std::bit_floor(static_cast<unsigned>(room / bytes))), 1,
                      limit);
  };
  const int most = vectors_in(kKeptBytes, kMostVectors);
  const int usual = vectors_in(kUsualBytes, 4);
  result.threads_x = power_of_two(ceil_div(vectors, vectors <= 32 ? 1 : usual), kMostThreads);
  if (vectors > 32) result.threads_x = std::max(result.threads_x, 32);
  const int64_t each = ceil_div(vectors, result.threads_x);
  result.loops = each > most;
  result.vectors = power_of_two(each, most);
  if (result.loops) {
    result.threads_x = kMostThreads;
    result.vectors = work.sums_columns ? kVectorsOfSummedStep : kVectorsOfStep;
  }
  result.threads_y = lines(work, result.threads_x);
}

bool wants_split(const Work& work, const Geometry& whole) {
  return whole.loops && !work.sums_columns && work.rows > 0 && work.rows <= kFewRows &&
         work.columns >= kManyColumns;
}

void split_rows(const Work& work, Geometry& result) {
  const int64_t columns = vectors_of_row(work) * result.vector;
  const int64_t each = ceil_div(columns, kBlocksOfSplitRows / work.rows);
  result.is_split = true;
  result.columns_per_strip = ceil_div(each, result.width()) * result.width();
  result.strips = ceil_div(columns, result.columns_per_strip);
}

void choose_strips(const Work& work, Geometry& result) {
  const int most = work.sums_columns ? kStripThreads : kThreads;
  const int64_t vectors = vectors_of_row(work);
  result.threads_x = power_of_two(vectors, most);
  result.threads_y = lines(work, result.threads_x);
  result.columns_per_strip = result.width();
  result.strips = std::max<int64_t>(1, ceil_div(vectors, result.threads_x));
}

// A total is one number for each block, which costs nothing.
int64_t rows_per_sum(const Work& work, const Geometry& geometry) {
  if (!work.sums_columns) return 1;
  return std::clamp(work.rows * geometry.strips / kBlocksOfSums, kFewestRowsPerSum, kRowsPerSum);
}

}  // namespace

Geometry choose_geometry(const Work& work) {
  Geometry result{.vector = work.vector};
  result.has_tail = work.columns % work.vector != 0;
  result.shift = work.shift;
  ORT_CHECK(!work.sums_columns || work.shift == 0, "CUDA: sums over rows: got rows shifted by ",
            work.shift, ", want none");
  if (work.reduces_rows) {
    choose_whole_rows(work, result);
    if (wants_split(work, result)) split_rows(work, result);
  } else {
    choose_strips(work, result);
  }
  const int64_t rows = work.rows / std::max<int64_t>(1, work.groups);
  const bool sums = work.sums_columns || work.sums_all;
  const int64_t lines = result.threads_y;
  if (result.is_split) {
    result.rows_per_block = 1;
  } else if (sums) {
    const int64_t blocks =
        std::max<int64_t>(1, kBlocksWanted / std::max<int64_t>(1, result.strips * work.groups));
    const int64_t wanted = std::max(rows_per_sum(work, result), ceil_div(rows, blocks));
    result.rows_per_block = std::min(ceil_div(wanted, lines), kMostRowsPerThread) * lines;
  } else {
    result.rows_per_block = lines * (work.reduces_rows ? 1 : kRowsOfPlainBlock);
  }
  result.blocks_per_group = ceil_div(rows, result.rows_per_block);
  return result;
}

}  // namespace torch_ort::cuda
