#include "cpu/product.h"

#include "base/error.h"
#include "base/rounding.h"
#include "cpu/caches.h"
#include "cpu/grid.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/rows.h"
#include "cpu/thread_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace torch_ort::cpu {

namespace {

// The sizes of blocks. The panels of a block of the right factor, kDepth steps deep, stay in the
// second-level cache while all rows of a block of the left factor are multiplied with them. A group
// of these rows stays in the first-level cache. Numbers of rows and columns are multiples of the
// tiles of all instruction sets.
constexpr int64_t kDepth = 256;
constexpr int64_t kBlockColumns = 768;
constexpr int64_t kBlockRows = 1920;
constexpr int64_t kListedRows = 960;  // kBlockRows for listed rows, which are copied
constexpr int64_t kGroupRows = 48;
// The same where the first-level cache has kWideFirstLevel bytes: what a tile reads fits into it.
constexpr int64_t kNarrowGroupRows = 36, kWideFirstLevel = 48 << 10;

// For up to kFewRows rows, packing a right factor that can be read in place does not pay. It does
// from kFewTiles tiles of rows on where its rows evict each other from the cache (kEvictingBytes).
constexpr int64_t kFewRows = 96, kFewTiles = 4;
// Where the second-level cache has kWideSecondLevel bytes, it pays for up to kReadRows rows
// nowhere: two panels of kReadDepth steps stay there, whatever the distance of their rows, and the
// second one is fetched while the first is used.
constexpr int64_t kWideSecondLevel = 2 << 20, kReadRows = 144, kReadDepth = 128;
// A right factor is streamed (few_rows_loops.h) for up to so many rows if its columns are
// contiguous and not too short. If its rows are, it is for up to Kernels::stripe_rows; and for up
// to kFarRows times as many if they are so far apart that tiles would bring a page for each few of
// their numbers.
constexpr int64_t kStreamedColumns = 8, kLeastStreamed = 128;
constexpr int64_t kFarRows = 4, kFarBytes = 1 << 16;
// Numbers of the left factor that are copied for it at most.
constexpr int64_t kMostCopied = 1 << 16;
// For fewer than kFewColumns columns, packing a left factor that can be read in place does not pay.
// From kManyColumns on it pays even if its rows do not evict each other from the cache, which they
// do where their distance is a multiple of kEvictingBytes.
constexpr int64_t kFewColumns = 128, kManyColumns = 384;
constexpr int64_t kEvictingBytes = 4096;
constexpr int64_t kLineBytes = 64;  // of a cache

constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
constexpr int64_t kMostOfPairs = 1 << 25;    // multiplications; see is_preferred()

// The matrices of an operand, one for each place in the batch.
struct Matrices {
  ir::DType dtype = ir::DType::kUndefined;
  int64_t rows = 0, columns = 0;
  int64_t row = 0, column = 0;   // strides, in elements
  std::vector<int64_t> batches;  // strides of the batch dims

  Matrices() = default;
  explicit Matrices(const Layout& layout) : dtype(layout.dtype) {
    const size_t rank = layout.sizes.size();
    ORT_CHECK(rank >= 2, "product: got an operand of ", rank, " dims, want 2 or more");
    rows = layout.sizes[rank - 2];
    columns = layout.sizes[rank - 1];
    row = layout.strides[rank - 2];
    column = layout.strides[rank - 1];
    batches.assign(layout.strides.begin(), layout.strides.end() - 2);
    for (size_t i = 0; i < batches.size(); ++i) {
      if (layout.sizes[i] == 1) batches[i] = 0;
    }
  }

  // The transposed matrices.
  Matrices turned() const {
    Matrices other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row, other.column);
    return other;
  }
  // The offset of an element, in bytes.
  int64_t offset(int64_t i, int64_t j) const {
    return (i * row + j * column) * ir::size_bytes(dtype);
  }
};

// One matrix, or the part of it from an element on.
struct Matrix {
  const char* data;
  ir::DType dtype;
  int64_t row, column;  // strides, in elements

  Matrix(const char* base, const Matrices& all, int64_t i, int64_t j)
      : Matrix(base + all.offset(i, j), all.dtype, all.row, all.column) {}
  Matrix(const char* first, ir::DType type, int64_t row_stride, int64_t column_stride)
      : data(first), dtype(type), row(row_stride), column(column_stride) {}

  Matrix turned() const { return {data, dtype, column, row}; }
  Matrix from(int64_t i, int64_t j) const {
    return {data + (i * row + j * column) * ir::size_bytes(dtype), dtype, row, column};
  }
};

// The part of a product that is computed: m rows and n columns of the result, and k terms of their
// sums. They are consecutive, except for those that are listed.
struct Part {
  int64_t m, n, k;
  int64_t row = 0, column = 0, step = 0;  // the first of each
  const int64_t* rows = nullptr;   // m indices of rows of the left factor, the start and the result
  const int64_t* steps = nullptr;  // k indices of columns of the left factor, rows of the right one

  Part turned() const {
    return {.m = n, .n = m, .k = k, .row = column, .column = row, .step = step, .steps = steps};
  }
};

// Copies the listed rows of a matrix, `n` numbers of kSize bytes each. `side_by_side`: the copy is
// column-major.
template <int64_t kSize>
void copy_rows(char* to, const Matrix& from, const int64_t* rows, int64_t count, int64_t n,
               bool side_by_side) {
  if (n == 0) return;  // there may be no memory to copy from
  const int64_t row = from.row * kSize, column = from.column * kSize;
  if (side_by_side) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < count; ++i, to += kSize) {
        std::memcpy(to, from.data + rows[i] * row + j * column, kSize);
      }
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const char* numbers = from.data + rows[i] * row;
    if (from.column == 1) {
      std::memcpy(to, numbers, static_cast<size_t>(n * kSize));
      to += n * kSize;
      continue;
    }
    for (int64_t j = 0; j < n; ++j, to += kSize) std::memcpy(to, numbers + j * column, kSize);
  }
}

// A copy of the listed rows in the thread's memory, column-major if the matrix is.
template <Use kUse>
Matrix gathered(const Matrix& from, const int64_t* rows, int64_t count, int64_t n) {
  const int64_t size = ir::size_bytes(from.dtype);
  const bool side_by_side = from.column != 1 && from.row < from.column;
  char* to = thread_memory<char, kUse>(count * n * size);
  const auto copy = size == 2 ? copy_rows<2> : size == 4 ? copy_rows<4> : copy_rows<8>;
  copy(to, from, rows, count, n, side_by_side);
  return {to, from.dtype, side_by_side ? 1 : n, side_by_side ? count : 1};
}

// Whether the columns of a right factor are contiguous, and long enough to be multiplied each by
// itself.
bool has_long_columns(const Matrices& right) {
  return right.row == 1 && right.rows >= kLeastStreamed;
}

// Whether a right factor is read where it stands, for so many rows of the left one.
bool is_worth_streaming(const Matrices& right, int64_t rows, int64_t stripe_rows) {
  // Short floats would have to be converted, for which tiles have faster ways.
  if (right.dtype != ir::DType::kFloat && right.dtype != ir::DType::kDouble) return false;
  if (has_long_columns(right)) return rows <= kStreamedColumns;
  if (right.column != 1) return false;
  const bool are_far = right.row * ir::size_bytes(right.dtype) >= kFarBytes;
  return rows <= (are_far ? kFarRows * stripe_rows : stripe_rows);
}

template <typename T>
class ProductKernel final : public Kernel {
 public:
  // What parts of a product are asked for: none but the whole; any, of rows, columns and steps that
  // are consecutive or listed; or any but listed rows.
  enum class Parts : uint8_t { kNone, kAny, kNoListedRows };

  ProductKernel(const region::Product& product, Isa isa, Parts parts = Parts::kNone)
      : kernels_(kernels<T>(isa)),
        pairs_(product.a.dtype == ir::DType::kBFloat16 && product.b.dtype == product.a.dtype
                   ? pair_kernels(isa)
                   : nullptr),
        c_(product.result),
        a_(product.a),
        b_(product.b),
        sizes_(product.result.sizes) {
    ORT_CHECK(a_.rows == c_.rows && b_.columns == c_.columns && a_.columns == b_.rows,
              "product: got ", a_.rows, " x ", a_.columns, " times ", b_.rows, " x ", b_.columns,
              " for ", c_.rows, " x ", c_.columns);
    sizes_.resize(sizes_.size() - 2);
    check_batches(product.a);
    check_batches(product.b);
    if (product.start) {
      start_ = Matrices(*product.start);
      has_start_ = true;
      check_batches(*product.start);
      if (start_.rows == 1) start_.row = 0;
      if (start_.columns == 1) start_.column = 0;
      ORT_CHECK((start_.rows == c_.rows || start_.rows == 1) &&
                    (start_.columns == c_.columns || start_.columns == 1),
                "product: got ", start_.rows, " x ", start_.columns, " to begin with, want ",
                c_.rows, " x ", c_.columns);
    }
    for (int64_t size : sizes_) num_batches_ *= size;
    // The register kernel writes rows, so a column-major result is computed as its transpose.
    // So is a single column, whose right factor is the larger one then.
    const bool is_column = parts == Parts::kNone && c_.columns == 1 && c_.rows > 1;
    if (is_column || (parts != Parts::kAny && c_.column != 1 && c_.row == 1)) {
      is_turned_ = true;
      const Matrices a = a_.turned();
      a_ = b_.turned();
      b_ = a;
      c_ = c_.turned();
      start_ = start_.turned();
    }
    m_ = c_.rows;
    n_ = c_.columns;
    k_ = a_.columns;
    writes_directly_ = c_.dtype == kDType && (c_.column == 1 || n_ == 1);
    const Caches caches = cpu::caches();
    if (caches.first_level >= kWideFirstLevel) group_rows_ = kNarrowGroupRows;
    // The order of sums must not depend on which rows are computed, so that all rows count, and
    // what is turned for some parts alone is left out.
    reads_right_ = caches.second_level >= kWideSecondLevel && !is_turned_ && c_.column == 1 &&
                   m_ <= kReadRows && reads_in_place(b_);
    is_streamed_ = parts == Parts::kNone && is_worth_streaming(b_, m_, kernels_.stripe_rows) &&
                   (reads_left_in_place() || m_ * k_ <= kMostCopied);
  }

  std::string str() const override {
    return concat("product, ", num_batches_ == 1 ? "" : concat(num_batches_, " times "), m_, " x ",
                  k_, " x ", n_, " of ", ir::name(c_.dtype), is_turned_ ? ", turned" : "",
                  is_streamed_ ? ", streamed" : "", has_start_ ? ", added to" : "", "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    run_part(inputs, outputs, is_turned_ ? whole().turned() : whole());
  }
  // `part` refers to the product as it was given, not to its transpose.
  void run(const void* const* inputs, void* const* outputs, const Part& part) const {
    run_part(inputs, outputs, is_turned_ ? part.turned() : part);
  }
  // The whole product, as it was given.
  Part whole() const { return {.m = is_turned_ ? n_ : m_, .n = is_turned_ ? m_ : n_, .k = k_}; }

 private:
  static constexpr ir::DType kDType =
      std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

  // The numbers with which sums start; without an address they start with zero.
  struct Start {
    const T* at = nullptr;
    int64_t row = 0;  // stride

    Start from(int64_t i) const { return {at == nullptr ? at : at + i * row, row}; }
  };

  // The matrices of one place in the batch.
  struct Addresses {
    const char *a, *b, *start;
    char* c;
  };

  void run_part(const void* const* inputs, void* const* outputs, const Part& part) const {
    if (num_batches_ == 0 || part.m == 0 || part.n == 0) return;
    const int64_t work = part.m * part.n * std::max<int64_t>(part.k, 1);
    const int64_t wanted =
        std::clamp<int64_t>(work * num_batches_ / kWorkPerThread, 1, num_threads());
    // The order of a streamed sum depends on the rows that are computed with it.
    const Grid grid(part.m, part.n, ceil_div(wanted, num_batches_), is_streamed_ ? 1 : part.m,
                    kernels_.product_rows, kernels_.panel_width);
    const int64_t parts = grid.num_parts(), all = parts * num_batches_;
    parallel_for(0, all, ceil_div(all, wanted), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        multiply(matrices_of(i / parts, inputs, outputs, part), part, grid.part(i % parts));
      }
    });
  }

  void check_batches(const Layout& layout) const {
    ORT_CHECK(layout.sizes.size() == sizes_.size() + 2, "product: got an operand of ",
              layout.sizes.size(), " dims, want ", sizes_.size() + 2);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      ORT_CHECK(layout.sizes[i] == sizes_[i] || layout.sizes[i] == 1, "product: dim ", i, ": got ",
                layout.sizes[i], ", want ", sizes_[i]);
    }
  }

  // The addresses of the part's first row, column and step.
  Addresses matrices_of(int64_t batch, const void* const* inputs, void* const* outputs,
                        const Part& part) const {
    const auto offset = [&](const Matrices& matrices, int64_t row, int64_t column) {
      int64_t elements = row * matrices.row + column * matrices.column, rest = batch;
      for (size_t i = sizes_.size(); i-- > 0; rest /= sizes_[i]) {
        elements += rest % sizes_[i] * matrices.batches[i];
      }
      return elements * ir::size_bytes(matrices.dtype);
    };
    const auto input = [&](int i, const Matrices& matrices, int64_t row, int64_t column) {
      return static_cast<const char*>(inputs[i]) + offset(matrices, row, column);
    };
    return {.a = input(is_turned_ ? 1 : 0, a_, part.row, part.step),
            .b = input(is_turned_ ? 0 : 1, b_, part.step, part.column),
            .start = has_start_ ? input(2, start_, part.row, part.column) : nullptr,
            .c = static_cast<char*>(outputs[0]) + offset(c_, part.row, part.column)};
  }

  // Computes one thread's rectangle of the part.
  void multiply(const Addresses& at, const Part& part, const Rectangle& all) const {
    const int64_t height = block_height(part, all);
    // Rows of a streamed factor are read in long runs, unless the sums need memory of the thread.
    const int64_t width = is_streamed_ && writes_directly_
                              ? all.columns
                              : even_part(all.columns, kBlockColumns, kernels_.panel_width);
    if (part.rows != nullptr && part.k <= most_at_once()) {
      // Listed rows are copied once for all columns, since all terms of a sum fit into one block.
      for (int64_t i = 0; i < all.rows; i += height) {
        const Matrix left = left_of(at, part, block_of(all, i, 0, height, width), 0, part.k);
        for (int64_t j = 0; j < all.columns; j += width) {
          multiply_block(at, part, block_of(all, i, j, height, width), &left);
        }
      }
      return;
    }
    for (int64_t j = 0; j < all.columns; j += width) {
      for (int64_t i = 0; i < all.rows; i += height) {
        multiply_block(at, part, block_of(all, i, j, height, width), nullptr);
      }
    }
  }

  // The number of rows in a block: whole groups.
  int64_t block_height(const Part& part, const Rectangle& all) const {
    return even_part(all.rows, part.rows != nullptr ? kListedRows : kBlockRows, group_rows_);
  }

  static Rectangle block_of(const Rectangle& all, int64_t i, int64_t j, int64_t height,
                            int64_t width) {
    return {all.row + i, std::min(height, all.rows - i), all.column + j,
            std::min(width, all.columns - j)};
  }

  // How many terms of a sum a step adds, how many a block has, and how many steps some of them
  // take.
  int64_t at_once() const { return pairs_ != nullptr ? 2 : 1; }
  int64_t most_at_once() const { return at_once() * (reads_right_ ? kReadDepth : kDepth); }
  int64_t steps_of(int64_t depth) const {
    return pairs_ != nullptr ? round_up(ceil_div(depth, 2), pairs_->pairs_at_once) : depth;
  }

  // `left`: the block's rows of the left factor if they have been copied, else nullptr.
  void multiply_block(const Addresses& at, const Part& part, const Rectangle& block,
                      const Matrix* left) const {
    if (writes_directly_ && part.rows == nullptr) {
      T* c = reinterpret_cast<T*>(at.c + c_.offset(block.row, block.column));
      return multiply_block(at, part, block, left, c, c_.row, true);
    }
    T* sums = thread_memory<T, Use::kProduct>(block.rows * block.columns);
    multiply_block(at, part, block, left, sums, block.columns, !writes_directly_);
    if (!writes_directly_) store(at, part, block, sums);
  }

  void store(const Addresses& at, const Part& part, const Rectangle& block, const T* sums) const {
    const auto store_rows = kernels_.store[static_cast<size_t>(c_.dtype)];
    int64_t count = 0;  // of consecutive rows, which are stored at once
    for (int64_t i = 0; i < block.rows; i += count) {
      count = block.rows;
      int64_t row = block.row;
      if (part.rows != nullptr) {
        const int64_t* rows = part.rows + block.row + i;
        row = rows[0];
        for (count = 1; i + count < block.rows && rows[count] == row + count;) ++count;
      }
      store_rows(at.c + c_.offset(row, block.column), sums + i * block.columns,
                 {.n = block.columns, .stride = c_.column, .count = count, .distance = c_.row});
    }
  }

  // The numbers with which the sums of a block start. If the register kernel cannot read them in
  // place, they are copied to `c`, which the sums then overwrite.
  Start start_of(const Addresses& at, const Part& part, const Rectangle& block, T* c,
                 int64_t c_row) const {
    if (!has_start_) return {};
    const bool is_one_run = part.rows == nullptr || start_.row == 0;
    if (start_.dtype == kDType && start_.column == 1 && is_one_run) {
      return {reinterpret_cast<const T*>(at.start + start_.offset(block.row, block.column)),
              start_.row};
    }
    for (int64_t i = 0; i < block.rows; ++i) {
      const int64_t row = part.rows == nullptr ? block.row + i : part.rows[block.row + i];
      kernels_.load[static_cast<size_t>(start_.dtype)](
          c + i * c_row, at.start + start_.offset(row, block.column),
          {.n = block.columns, .stride = start_.column});
    }
    return {c, c_row};
  }

  // The left factor of a block for `depth` terms of the sums from `p` on.
  Matrix left_of(const Addresses& at, const Part& part, const Rectangle& block, int64_t p,
                 int64_t depth) const {
    if (part.rows != nullptr) {
      return gathered<Use::kLeftRows>({at.a, a_, 0, p}, part.rows + block.row, block.rows, depth);
    }
    if (part.steps != nullptr) {
      const Matrix columns = Matrix(at.a, a_, block.row, 0).turned();
      return gathered<Use::kLeftRows>(columns, part.steps + p, depth, block.rows).turned();
    }
    return {at.a, a_, block.row, p};
  }

  // The right factor for the same terms.
  Matrix right_of(const Addresses& at, const Part& part, const Rectangle& block, int64_t p,
                  int64_t depth) const {
    if (part.steps == nullptr) return {at.b, b_, p, block.column};
    return gathered<Use::kRightRows>({at.b, b_, 0, block.column}, part.steps + p, depth,
                                     block.columns);
  }

  // Whether the register kernel cannot read a left factor in place.
  bool needs_packing(const Matrix& left, int64_t k) const {
    if (pairs_ != nullptr)
      return left.column != 1 || left.row % 2 != 0 || k % (2 * pairs_->pairs_at_once) != 0;
    return left.dtype != kDType || (left.column != 1 && left.row != 1);
  }

  // Whether packing a left factor is faster than reading it in place, for so many columns of the
  // result and sums of `k` terms. Rows at certain distances evict each other from the first-level
  // cache, and steps that are so far apart or farther miss the TLB. Of each step a tile reads a
  // part of a cache line; if that is less than half, the lines of all steps fill the cache.
  bool is_worth_packing(const Matrix& left, int64_t rows, int64_t columns, int64_t k) const {
    if (columns < kFewColumns || rows < kernels_.product_rows) return false;
    const int64_t size = ir::size_bytes(left.dtype);
    const bool has_many = columns >= kManyColumns;
    if (left.column == 1) return has_many || left.row * size % kEvictingBytes == 0;
    if (2 * kernels_.product_rows * size < kLineBytes && has_tiles(rows)) return true;
    return left.column * size >= kEvictingBytes && (has_many || k > kDepth);
  }

  // Whether packing a right factor is faster than reading it in place, or the only way.
  bool is_worth_packing(const Matrix& right, int64_t rows) const {
    if (reads_right_) return false;
    if (!reads_in_place(right) || rows > kFewRows) return true;
    const bool evicts = right.row * ir::size_bytes(right.dtype) % kEvictingBytes == 0;
    return evicts && has_tiles(rows);
  }
  bool has_tiles(int64_t rows) const { return rows >= kFewTiles * kernels_.product_rows; }

  // Panels of columns of the right factor. Whole panels may be read in place; the columns that
  // remain are always packed.
  struct Panels {
    const T* whole = nullptr;
    int64_t num_whole = 0, row = 0, distance = 0;  // strides of rows and of panels
    const T* rest = nullptr;
    int64_t num_rest = 0, rest_width = 0;  // the columns that remain, and the width of their panel
  };

  int64_t packed_size(int64_t columns, int64_t steps) const {
    return round_up(columns, kernels_.panel_width) * steps;
  }

  // Whether kernels can read the rows of a factor in place: whole panels of a right one.
  template <typename AnyMatrix>
  static bool reads_in_place(const AnyMatrix& factor) {
    return factor.dtype == kDType && factor.column == 1;
  }

  // `packs`: whole panels are packed into `memory` as well, instead of read in place.
  Panels panels_of(const Matrix& b, int64_t columns, int64_t depth, bool packs, T* memory) const {
    const int64_t wide = kernels_.panel_width, steps = steps_of(depth);
    Panels panels{.num_whole = columns / wide, .num_rest = columns % wide};
    panels.whole = packs ? memory : reinterpret_cast<const T*>(b.data);
    panels.row = packs ? wide : b.row;
    panels.distance = packs ? wide * steps : wide;
    if (packs && panels.num_whole > 0) {
      pack(memory, b.turned(), panels.num_whole * wide, depth, wide);
      memory += panels.num_whole * wide * steps;
    }
    if (panels.num_rest == 0) return panels;
    panels.rest = memory;
    panels.rest_width = panels.num_rest <= wide / 2 ? wide / 2 : wide;
    pack(memory, b.from(0, panels.num_whole * wide).turned(), panels.num_rest, depth,
         panels.rest_width);
    return panels;
  }

  // Multiplies some rows of the left factor with all panels.
  void multiply_group(const Matrix& a, int64_t rows, int64_t depth, bool packs_left,
                      const Panels& panels, T* c, int64_t c_row, const Start& start) const {
    const int64_t steps = steps_of(depth), tile = kernels_.product_rows;
    const T* left = reinterpret_cast<const T*>(a.data);
    if (packs_left) {
      T* packed = thread_memory<T, Use::kLeft>(round_up(rows, tile) * steps);
      pack(packed, a, rows, depth, tile);
      left = packed;
    }
    PanelProduct<T> product{.c = c,
                            .c_row = c_row,
                            .start = start.at,
                            .start_row = start.row,
                            .a = left,
                            .a_row = a.row / at_once(),
                            .a_column = a.column,
                            .a_is_packed = packs_left,
                            .b = panels.whole,
                            .b_row = panels.row,
                            .b_panel = panels.distance,
                            .width = kernels_.panel_width,
                            .num_panels = panels.num_whole,
                            .columns = panels.num_whole * kernels_.panel_width,
                            .m = rows,
                            .k = steps,
                            .fetches_next = reads_right_};
    if (panels.num_whole > 0) multiply_panels(product);
    if (panels.num_rest == 0) return;
    product.c += product.columns;
    if (start.at != nullptr) product.start += product.columns;
    product.b = panels.rest;
    product.b_row = product.width = panels.rest_width;
    product.num_panels = 1;
    product.columns = panels.num_rest;
    multiply_panels(product);
  }

  bool reads_left_in_place() const { return reads_in_place(a_); }

  // Multiplies few rows with a right factor that is not packed.
  void stream_block(const Addresses& at, const Rectangle& block, T* c, int64_t c_row,
                    const Start& start) const {
    const bool has_columns = has_long_columns(b_);
    const auto multiply = has_columns ? kernels_.multiply_columns : kernels_.multiply_stripes;
    multiply({.c = c,
              .c_row = c_row,
              .start = start.at,
              .start_row = start.row,
              .a = left_rows(at, block),
              .a_row = reads_left_in_place() ? a_.row : k_,
              .b = reinterpret_cast<const T*>(at.b + b_.offset(0, block.column)),
              .b_stride = has_columns ? b_.column : b_.row,
              .m = block.rows,
              .n = block.columns,
              .k = k_});
  }

  // The rows of the left factor with contiguous numbers of type T.
  const T* left_rows(const Addresses& at, const Rectangle& block) const {
    const char* from = at.a + a_.offset(block.row, 0);
    if (reads_left_in_place()) return reinterpret_cast<const T*>(from);
    T* rows = thread_memory<T, Use::kLeft>(block.rows * k_);
    kernels_.load[static_cast<size_t>(a_.dtype)](
        rows, from, {.n = k_, .stride = a_.column, .count = block.rows, .distance = a_.row});
    return rows;
  }

  // `stays`: the sums stay in `c`. Otherwise complete rows are copied to the listed rows of the
  // result while they are in the cache.
  void multiply_block(const Addresses& at, const Part& part, const Rectangle& block,
                      const Matrix* copied, T* c, int64_t c_row, bool stays) const {
    Start start = start_of(at, part, block, c, c_row);
    if (is_streamed_) return stream_block(at, block, c, c_row, start);
    const bool is_few = reads_right_ || block.rows <= kFewRows;
    for (int64_t p = 0; p == 0 || p < part.k; p += most_at_once()) {
      const int64_t depth = std::min(most_at_once(), part.k - p);
      const Matrix a = copied != nullptr ? *copied : left_of(at, part, block, p, depth);
      const Matrix b = right_of(at, part, block, p, depth);
      const bool packs_left =
          needs_packing(a, part.k) || is_worth_packing(a, block.rows, block.columns, part.k);
      T* packed = thread_memory<T, Use::kRight>(packed_size(block.columns, steps_of(depth)));
      const Panels panels =
          panels_of(b, block.columns, depth, is_worth_packing(b, block.rows), packed);
      const bool leaves = !stays && p + depth == part.k;
      const int64_t group = is_few && !leaves ? block.rows : group_rows_;
      for (int64_t i = 0; i < block.rows; i += group) {
        const int64_t rows = std::min(group, block.rows - i);
        T* to = c + i * c_row;
        int64_t to_row = c_row;
        if (leaves) {
          to = thread_memory<T, Use::kPanel>(rows * block.columns);
          to_row = block.columns;
        }
        multiply_group(a.from(i, 0), rows, depth, packs_left, panels, to, to_row, start.from(i));
        if (leaves) scatter_rows(at, part, block, i, rows, to);
      }
      start = {c, c_row};
    }
  }

  // Copies contiguous rows to the listed rows of the result.
  void scatter_rows(const Addresses& at, const Part& part, const Rectangle& block, int64_t first,
                    int64_t count, const T* from) const {
    for (int64_t i = first; i < first + count; ++i, from += block.columns) {
      std::memcpy(at.c + c_.offset(part.rows[block.row + i], block.column), from,
                  static_cast<size_t>(block.columns) * sizeof(T));
    }
  }

  void multiply_panels(const PanelProduct<T>& product) const {
    if constexpr (std::is_same_v<T, float>) {
      if (pairs_ != nullptr) return pairs_->multiply(product);
    }
    kernels_.multiply(product);
  }

  // Packs the first `count` rows and `depth` columns of a factor into panels of `width` rows.
  void pack(T* to, const Matrix& factor, int64_t count, int64_t depth, int64_t width) const {
    if (pairs_ == nullptr && factor.dtype == kDType) {
      return kernels_.pack({.to = to,
                            .width = width,
                            .steps = depth,
                            .from = reinterpret_cast<const T*>(factor.data),
                            .across = factor.row,
                            .along = factor.column,
                            .count = count});
    }
    const int64_t steps = steps_of(depth);
    for (int64_t i = 0; i < count; i += width, to += width * steps) {
      pack_panel(to, factor.from(i, 0), std::min(width, count - i), depth, width);
    }
  }

  // The same for one panel of another dtype.
  void pack_panel(T* to, const Matrix& factor, int64_t count, int64_t depth, int64_t width) const {
    if constexpr (std::is_same_v<T, float>) {
      if (pairs_ != nullptr) {
        return pairs_->pack({.to = to,
                             .width = width,
                             .numbers = depth,
                             .from = reinterpret_cast<const uint16_t*>(factor.data),
                             .across = factor.row,
                             .along = factor.column,
                             .count = count});
      }
    }
    const bool is_along = factor.column == 1;
    T* numbers = thread_memory<T, Use::kConverted>(count * depth);
    kernels_.load[static_cast<size_t>(factor.dtype)](
        numbers, factor.data,
        {.n = is_along ? depth : count,
         .stride = is_along ? 1 : factor.row,
         .count = is_along ? count : depth,
         .distance = is_along ? factor.row : factor.column});
    pack(to,
         {reinterpret_cast<const char*>(numbers), kDType, is_along ? depth : 1,
          is_along ? 1 : count},
         count, depth, width);
  }

  const Kernels<T>& kernels_;
  const PairKernels* pairs_;  // nullptr: bfloat16 is converted to float32
  Matrices c_, a_, b_, start_;
  std::vector<int64_t> sizes_;  // of the batch dims
  int64_t num_batches_ = 1, m_ = 0, n_ = 0, k_ = 0;
  bool has_start_ = false;
  bool is_turned_ = false;        // it computes the transpose: a_ and b_ have changed places
  bool writes_directly_ = false;  // the register kernel can write to c
  bool is_streamed_ = false;      // the right factor is read where it stands, for few rows
  bool reads_right_ = false;      // the same, by tiles (kReadRows)
  int64_t group_rows_ = kGroupRows;
};

// Consecutive rows are a smaller product, which is computed in place. Other rows are copied first,
// as many at a time as a block needs.
template <typename T>
class RowsProductKernel final : public Kernel {
 public:
  RowsProductKernel(const region::Product& product, bool sums, Isa isa)
      : of_runs_(product, isa, ProductKernel<T>::Parts::kNoListedRows),
        of_lists_(product, isa,
                  sums ? ProductKernel<T>::Parts::kNoListedRows : ProductKernel<T>::Parts::kAny),
        sums_(sums),
        rows_input_(product.start ? 3 : 2) {}

  std::string str() const override {
    return concat(sums_ ? "sums over listed rows, " : "listed rows, ", of_runs_.str());
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    Part part = of_runs_.whole();
    const RowList list(inputs[rows_input_], sums_ ? part.k : part.m);
    (sums_ ? part.k : part.m) = list.count();
    if (!list.is_run()) {
      (sums_ ? part.steps : part.rows) = list.rows();
      return of_lists_.run(inputs, outputs, part);
    }
    if (list.count() > 0) (sums_ ? part.step : part.row) = list.rows()[0];
    of_runs_.run(inputs, outputs, part);
  }

 private:
  ProductKernel<T> of_runs_, of_lists_;
  bool sums_;
  int rows_input_;
};

// Whether products of the dtype are computed in float32.
bool is_short_or_float32(ir::DType dtype) {
  return dtype == ir::DType::kFloat || ir::is_short_float(dtype);
}

void refuse_dtypes(const region::Product& product) {
  throw Unsupported(concat("product: got ", ir::name(product.a.dtype), " and ",
                           ir::name(product.b.dtype), " for ", ir::name(product.result.dtype),
                           ", want one dtype of floats"));
}

void check_dtypes(const region::Product& product) {
  if (!is_of_floats(product)) refuse_dtypes(product);
}

// Dtypes may differ if all of them are computed in float32.
void check_mixed(const region::Product& product) {
  const bool is_mixed = is_short_or_float32(product.result.dtype) &&
                        is_short_or_float32(product.a.dtype) &&
                        is_short_or_float32(product.b.dtype) &&
                        (!product.start || is_short_or_float32(product.start->dtype));
  if (!is_of_floats(product) && !is_mixed) refuse_dtypes(product);
}

}  // namespace

bool is_of_floats(const region::Product& product) {
  const ir::DType dtype = product.result.dtype;
  return (dtype == ir::DType::kDouble || is_short_or_float32(dtype)) && product.a.dtype == dtype &&
         product.b.dtype == dtype && (!product.start || product.start->dtype == dtype);
}

bool is_preferred(const region::Product& product, Isa isa) {
  if (!is_of_floats(product)) return false;
  const size_t rank = product.a.sizes.size();
  ORT_CHECK(rank >= 2, "product: got an operand of ", rank, " dims, want 2 or more");
  const int64_t m = product.a.sizes[rank - 2], k = product.a.sizes[rank - 1];
  const int64_t n = product.b.sizes.back();
  // A vector times a matrix reads each number once, so packing does not pay.
  if (m == 1 || n == 1) {
    const Matrices matrix = m == 1 ? Matrices(product.b) : Matrices(product.a).turned();
    return is_worth_streaming(matrix, 1, 1);
  }
  // oneDNN, which torch calls for bfloat16, takes long to start, and is then about 7% faster.
  return product.result.dtype != ir::DType::kBFloat16 || pair_kernels(isa) == nullptr ||
         m * k * n <= kMostOfPairs;
}

std::unique_ptr<const Kernel> make_product(const region::Product& product, Isa isa) {
  check_mixed(product);
  if (product.result.dtype == ir::DType::kDouble) {
    return std::make_unique<const ProductKernel<double>>(product, isa);
  }
  return std::make_unique<const ProductKernel<float>>(product, isa);
}

std::unique_ptr<const Kernel> make_rows_product(const region::Product& product, const Layout& rows,
                                                bool sums, Isa isa) {
  check_mixed(product);
  ORT_CHECK(product.result.sizes.size() == 2, "RowsProduct: got a result of ",
            product.result.sizes.size(), " dims, want 2");
  const int64_t num_rows = product.a.sizes.at(sums ? 1 : 0);
  check_row_list(rows, num_rows);
  if (product.result.dtype == ir::DType::kDouble) {
    return std::make_unique<const RowsProductKernel<double>>(product, sums, isa);
  }
  return std::make_unique<const RowsProductKernel<float>>(product, sums, isa);
}

std::unique_ptr<const Kernel> make_rows_product(const BoundNode& bound) {
  const std::vector<Layout>& inputs = bound.inputs;
  region::Product product{bound.outputs.at(0), inputs.at(0), inputs.at(1), std::nullopt};
  if (inputs.size() == 4) {
    product.start = inputs[2];
    ORT_CHECK(product.start->sizes.size() <= 2, "RowsProduct: got a start of ",
              product.start->sizes.size(), " dims, want 2 or less");
    const size_t missing = 2 - product.start->sizes.size();
    product.start->sizes.insert(product.start->sizes.begin(), missing, 1);
    product.start->strides.insert(product.start->strides.begin(), missing, 0);
  }
  check_dtypes(product);
  return make_rows_product(product, inputs.back(), ir::int_attr(bound.node.attrs, "sums", 0) != 0,
                           isa_of(bound));
}

}  // namespace torch_ort::cpu
