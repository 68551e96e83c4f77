// Rows of a gradient that are added by their ids, after prelude.cuh: ids of words for an embedding,
// places along a dim for what was taken from there. The ids are sorted first, stably, so that the
// rows of an id follow each other in the order in which they came. The order of a sum then depends
// only on the number of its rows. There are no atomics on floats, so bits are the same in every run
// and on every GPU.
//
//   sort           sorts by one digit of the ids: each block counts its ids by their digit, and in
//                  the next launch moves them to their places. A single block sorts few ids by all
//                  digits in one launch. All of it is one kernel, to be compiled once.
//   add_parts      adds 128 rows at a time for ids that have more
//   write_table    writes each row of the table once: zeros, a sum of rows, or a sum of parts

enum {
  kWarps = 8,
  kThreads = 32 * kWarps,
  kTile = 1024,  // ids that a block sorts at a time
  kBins = 512,   // values of a digit
  kFew = 8,      // rows that one warp adds; a block adds more
  kPart = 128,   // rows of a part
  kRows = 32,    // rows of the table that a block writes
  kMostAxes = 64,
};

// The layout of ids, rows or columns: dims from the outermost one on. csrc/cuda/sorted_sums.cpp
// fills it.
struct Axes {
  i64 sizes[kMostAxes], strides[kMostAxes];
  int count, unused;
};

// The offset of an element. With kIsRun, all elements have the same distance.
template <bool kIsRun>
INLINE i64 offset_of(const Axes& axes, u32 number) {
  i64 offset = 0;
  if constexpr (!kIsRun) {
#pragma unroll 1
    for (int i = axes.count - 1; i > 0; --i) {
      const u32 size = u32(axes.sizes[i]);
      offset += i64(number % size) * axes.strides[i];
      number /= size;
    }
  }
  return offset + i64(number) * axes.strides[0];
}

// A row is all that one id selects, in whatever dims it lies; a column is one element of it. The
// strides in the gradient are in `from`, the others are those of the table.
struct Columns {
  Axes from;
  i64 to[kMostAxes], to_row;
};
struct Offsets {
  i64 from, to;
};
template <bool kIsRun>
INLINE Offsets offsets_of(const Columns& columns, index_t column) {
  Offsets offsets = {0, 0};
  if constexpr (!kIsRun) {
    for (int i = columns.from.count - 1; i > 0; --i) {
      const index_t size = index_t(columns.from.sizes[i]), at = column % size;
      offsets.from += i64(at) * columns.from.strides[i];
      offsets.to += i64(at) * columns.to[i];
      column /= size;
    }
  }
  offsets.from += i64(column) * columns.from.strides[0];
  offsets.to += i64(column) * columns.to[0];
  return offsets;
}

// ---- sorting. A key is an id, or the number of rows in place of one that is out of bounds.

// What is sorted: ids by the first digit, and then, where `ids` is nullptr, the keys that this has
// made, with their numbers. One type for both is half the code to compile. `below_zero` is added to
// negative ids: the number of rows if they count from the end, else 0. An id out of bounds writes
// `kind` into the word for errors.
template <typename Id>
struct Source {
  const Id* ids;
  const Axes& axes;
  u32 rows, below_zero;
  u32* fault;
  u32 kind;
  const u32 *keys, *numbers;

  __device__ __forceinline__ u32 key(u32 at) const {
    if (ids == nullptr) return keys[at];
    i64 id = i64(ids[offset_of<false>(axes, at)]);
    if (id < 0) id += i64(below_zero);
    if (id >= 0 && id < i64(rows)) return u32(id);
    *fault = kind;
    return rows;
  }
  __device__ __forceinline__ u32 number(u32 at) const { return ids == nullptr ? numbers[at] : at; }
};

struct Digit {
  int shift, bits;
  __device__ __forceinline__ u32 of(u32 key) const { return key >> shift & ((1u << bits) - 1); }
};

// The ids of a block. `of_block` is a multiple of kTile.
struct Share {
  u32 begin, end;
};
INLINE Share share_of_block(u32 count, u32 of_block) {
  const u32 begin = blockIdx.x * of_block, left = count - begin;
  return {begin, begin + (left < of_block ? left : of_block)};
}

// Writes how many ids of this block have each value of the digit.
template <typename From>
INLINE void count(const From& from, Share share, Digit digit, u32* counts, u32* shared) {
#pragma unroll
  for (int bin = 0; bin < kBins; bin += kThreads) shared[bin + threadIdx.x] = 0;
  // All threads have written what was sorted by the previous digit, too.
  __syncthreads();
  for (u32 at = share.begin + threadIdx.x; at < share.end; at += kThreads) {
    atomicAdd(shared + digit.of(from.key(at)), 1u);
  }
  __syncthreads();
  u32* const of_block = counts + blockIdx.x * kBins + threadIdx.x;
#pragma unroll
  for (int bin = 0; bin < kBins; bin += kThreads) of_block[bin] = shared[bin + threadIdx.x];
}

// The sum of the numbers of all threads before this one. `shared` has one number for each warp.
INLINE u32 sum_before(u32 x, u32* shared) {
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  u32 sum = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < warp; ++i) sum += shared[i];
  return sum - x;
}

enum { kSortNumbers = kBins + kWarps * kBins + kWarps };  // of shared memory

// Moves the ids of this block to their places among those of all blocks. Ids of equal digits keep
// their order: blocks have them in turn, and so have the warps of a block and the lanes of a warp.
template <typename From>
INLINE void place(const From& from, Share share, Digit digit, const u32* counts, u32 num_blocks,
                  u32* keys, u32* numbers, u32* shared) {
  enum { kRounds = kTile / kThreads };
  u32* const next = shared;              // by digit: the place of the next id
  u32* const of_warps = shared + kBins;  // the same for each warp
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 before[2] = {0, 0}, total[2] = {0, 0};
  for (u32 block = 0; block < num_blocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 count = counts[block * kBins + threadIdx.x * 2 + i];
      if (block < blockIdx.x) before[i] += count;
      total[i] += count;
    }
  }
  const u32 first = sum_before(total[0] + total[1], of_warps + kWarps * kBins);
  next[threadIdx.x * 2] = first + before[0];
  next[threadIdx.x * 2 + 1] = first + total[0] + before[1];

  u32* const mine = of_warps + warp * kBins;
  for (u32 tile = share.begin; tile < share.end; tile += kTile) {
    // All threads have found the places of the previous tile.
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kWarps * kBins; i += kThreads) of_warps[i] = 0;
    __syncthreads();
    u32 key[kRounds], number[kRounds], rank[kRounds];
    const u32 of_lane = tile + warp * (32 * kRounds) + lane;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const u32 at = of_lane + round * 32;
      const bool is_there = at < share.end;
      key[round] = is_there ? from.key(at) : 0;
      number[round] = is_there ? from.number(at) : 0;
      const u32 bin = digit.of(key[round]);
      // The lanes that have the same digit.
      u32 peers = __ballot_sync(0xFFFFFFFFu, is_there);
#pragma unroll 1
      for (int bit = 0; bit < digit.bits; ++bit) {
        const bool is_set = (bin >> bit & 1) != 0;
        const u32 lanes = __ballot_sync(0xFFFFFFFFu, is_set);
        peers &= is_set ? lanes : ~lanes;
      }
      const int below = __popc(peers & ((1u << lane) - 1));
      rank[round] = mine[bin] + below;
      __syncwarp();
      if (is_there && below == 0) mine[bin] += __popc(peers);
      __syncwarp();
    }
    __syncthreads();
#pragma unroll
    for (int begin = 0; begin < kBins; begin += kThreads) {
      const int bin = begin + int(threadIdx.x);
      u32 sum = next[bin];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const u32 count = of_warps[i * kBins + bin];
        of_warps[i * kBins + bin] = sum;
        sum += count;
      }
      next[bin] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (of_lane + round * 32 >= share.end) continue;
      const u32 to = mine[digit.of(key[round])] + rank[round];
      keys[to] = key[round];
      numbers[to] = number[round];
    }
  }
}

// Where sorted ids are: those of an even digit in the first arrays, of an odd one in the others.
struct Sorted {
  u32 *keys[2], *numbers[2], *counts;
};
INLINE u32* keys_of(const Sorted& sorted, int digit) {
  return digit % 2 == 0 ? sorted.keys[0] : sorted.keys[1];
}
INLINE u32* numbers_of(const Sorted& sorted, int digit) {
  return digit % 2 == 0 ? sorted.numbers[0] : sorted.numbers[1];
}

// What a launch does for each of its digits. A single block does both.
enum { kCount = 1, kPlace = 2 };
struct Digits {
  int begin, end, bits, what;
};

template <typename Id>
INLINE void sort(Source<Id> from, Share share, Digits digits, const Sorted& sorted, u32* shared) {
#pragma unroll 1
  for (int i = digits.begin; i < digits.end; ++i) {
    const Digit digit = {i * digits.bits, digits.bits};
    if (i > 0) {
      from.ids = nullptr;
      from.keys = keys_of(sorted, i - 1);
      from.numbers = numbers_of(sorted, i - 1);
    }
    if (digits.what & kCount) count(from, share, digit, sorted.counts, shared);
    __syncthreads();
    if (digits.what & kPlace) {
      place(from, share, digit, sorted.counts, gridDim.x, keys_of(sorted, i), numbers_of(sorted, i),
            shared);
    }
  }
}

// ---- sums, by blocks of 32 x 8 threads. A thread has V columns, and a line of threads 32 V.

// Sorted ids, and the numbers that they had before.
struct Order {
  const u32 *keys, *numbers;
  u32 count;
};

// The first place in [low, high) whose key is not less, or high.
INLINE u32 find_key(const Order& order, u32 low, u32 high, u32 key) {
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (order.keys[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// What is added. Rows, and columns, are a run if all of them have the same distance.
template <bool kRowsAreRun, bool kColumnsAreRun, typename T>
struct Gradient {
  const T* at;
  const Axes& rows;
  const Columns& columns;

  __device__ __forceinline__ const T* row(u32 number) const {
    return at + offset_of<kRowsAreRun>(rows, number);
  }
  __device__ __forceinline__ Offsets offsets(index_t column) const {
    return offsets_of<kColumnsAreRun>(columns, column);
  }
};

// Adds the rows of every kStep-th of `count` sorted ids, from `first` on. `offset` is that of a
// column.
template <int kStep, int V, typename Gradient>
INLINE void add_rows(wide (&sum)[V], const Gradient& gradient, const u32* numbers, int first,
                     int count, i64 offset) {
  // A number of rounds that is known allows loads of several rows at once.
  const int rounds = (count - first + kStep - 1) / kStep;
#pragma unroll 4
  for (int i = 0; i < rounds; ++i) {
    wide x[V];
    load(x, gradient.row(numbers[first + i * kStep]) + offset);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += x[j];
  }
}

// Parts begin kPart places apart, counted from the first row of their id. So among kPart places
// there are at most two: one that is the first of its id, and one that is not. Of the latter there
// is none among the first kPart places of all. So those of the next places have a slot beside the
// former.
INLINE u32 slot_of_part(u32 first_of_id, u32 part) {
  const u32 places = first_of_id / kPart + part;
  return part == 0 ? places * 2 + 1 : (places - 1) * 2;
}

// Adds every kWarps-th part of an id that has `count` rows, from the part `first` on.
template <int V>
INLINE void add_parts_of(wide (&sum)[V], const wide* parts, u32 first_of_id, u32 count, int first,
                         index_t column, index_t columns) {
  const int rounds = (int((count + kPart - 1) / kPart) - first + kWarps - 1) / kWarps;
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) {
    const u32 slot = slot_of_part(first_of_id, u32(first + i * kWarps));
    wide x[V];
    load(x, parts + i64(slot) * columns + column);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += x[j];
  }
}

// Adds the sums of all lines in order, and writes the result. `shared` has V numbers for each
// thread. Threads whose column does not exist take part.
template <int V, typename T>
INLINE void write_sum_of_lines(T* to, wide (&sum)[V], bool has_column, wide* shared) {
  // All threads have read the previous sums.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < V; ++i) shared[(threadIdx.y * V + i) * 32 + threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.y != 0 || !has_column) return;
#pragma unroll
  for (int line = 1; line < kWarps; ++line) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += shared[(line * V + i) * 32 + threadIdx.x];
  }
  store(to, sum);
}

// The places of the rows that a part adds; none if the slot has no part.
INLINE Share share_of_part(const Order& order, u32 slot, u32 rows, u32 padding) {
  const Share none = {0, 0};
  const bool is_first = slot % 2 != 0;
  // The id of the part has this place and the one before it.
  const u32 inside = (slot / 2 + 1) * kPart;
  if (inside >= order.count) return none;
  const u32 key = order.keys[inside];
  if (order.keys[inside - 1] != key || key == padding || key >= rows) return none;
  const u32 first_of_id = find_key(order, 0, inside, key);
  const u32 end = find_key(order, inside, order.count, key + 1);
  if (end - first_of_id <= kPart || (is_first && inside - first_of_id > kPart)) return none;
  const u32 first = is_first
                        ? first_of_id
                        : first_of_id + (inside - first_of_id + kPart - 1) / kPart * kPart;
  if (first >= end) return none;
  return {first, end - first < kPart ? end : first + kPart};
}

// What a block works on: a group of rows or a part, and a strip of columns. `width` is a multiple of
// 32 V.
struct Work {
  u32 group;
  index_t begin, end;
};
template <bool kRowsAreRun, bool kColumnsAreRun, typename T>
INLINE Work work_of_block(const Gradient<kRowsAreRun, kColumnsAreRun, T>& /*gradient*/,
                          index_t columns, u32 strips, index_t width) {
  // Columns that are a run are written one strip after the other. Of others, those of a strip may
  // lie apart, and the next rows are beside them in the cache.
  const u32 groups = gridDim.x / strips;
  const u32 group = kColumnsAreRun ? blockIdx.x / strips : blockIdx.x % groups;
  const u32 strip = kColumnsAreRun ? blockIdx.x % strips : blockIdx.x / groups;
  const index_t begin = index_t(strip) * width;
  return {group, begin, columns - begin < width ? columns : begin + width};
}

// A block adds the rows of one part, for a strip of columns.
template <int V, typename Gradient>
INLINE void add_parts(const Gradient& gradient, const Order& order, u32 rows, u32 padding,
                      index_t columns, u32 strips, index_t width, wide* parts, wide* shared) {
  const Work work = work_of_block(gradient, columns, strips, width);
  const Share share = share_of_part(order, work.group, rows, padding);
  if (share.begin == share.end) return;
  for (index_t from = work.begin; from < work.end; from += 32 * V) {
    const index_t column = from + index_t(threadIdx.x) * V;
    wide sum[V] = {};
    if (column < columns) {
      add_rows<kWarps>(sum, gradient, order.numbers + share.begin, int(threadIdx.y),
                       int(share.end - share.begin), gradient.offsets(column).from);
    }
    wide* const part = parts + i64(work.group) * columns + column;
    write_sum_of_lines(part, sum, column < columns, shared);
  }
}

// Of shared memory before the sums: the first place of each row, in multiples of 16 bytes.
enum { kBoundBytes = (kRows + 1 + 3) / 4 * 16 };

// A block writes kRows rows of the table, for a strip of columns.
template <int V, typename Gradient, typename T>
INLINE void write_table(const Gradient& gradient, const Order& order, u32 rows, u32 padding,
                        index_t columns, u32 strips, index_t width, const wide* parts, T* table,
                        u32* bounds, wide* shared) {
  const Work work = work_of_block(gradient, columns, strips, width);
  const u32 first_row = work.group * kRows;
  const u32 last_row = rows - first_row < kRows ? rows : first_row + kRows;
  const u32 thread = threadIdx.y * 32 + threadIdx.x;
  if (thread <= kRows) bounds[thread] = find_key(order, 0, order.count, first_row + thread);
  __syncthreads();
  for (u32 row = first_row + threadIdx.y; row < last_row; row += kWarps) {
    const u32 first = bounds[row - first_row];
    const u32 count = row == padding ? 0 : bounds[row - first_row + 1] - first;
    if (count > kFew) continue;
    T* const to = table + i64(row) * gradient.columns.to_row;
    for (index_t column = work.begin + index_t(threadIdx.x) * V; column < work.end;
         column += 32 * V) {
      const Offsets offsets = gradient.offsets(column);
      wide sum[V] = {};
      add_rows<1>(sum, gradient, order.numbers + first, 0, int(count), offsets.from);
      store(to + offsets.to, sum);
    }
  }
  for (u32 row = first_row; row < last_row; ++row) {
    const u32 first = bounds[row - first_row], count = bounds[row - first_row + 1] - first;
    if (count <= kFew || row == padding) continue;
    T* const to = table + i64(row) * gradient.columns.to_row;
    for (index_t from = work.begin; from < work.end; from += 32 * V) {
      const index_t column = from + index_t(threadIdx.x) * V;
      const Offsets offsets = gradient.offsets(column);
      wide sum[V] = {};
      if (column < work.end && count <= kPart) {
        add_rows<kWarps>(sum, gradient, order.numbers + first, int(threadIdx.y), int(count),
                         offsets.from);
      } else if (column < work.end) {
        add_parts_of(sum, parts, first, count, int(threadIdx.y), column, columns);
      }
      write_sum_of_lines(to + offsets.to, sum, column < work.end, shared);
    }
  }
}
