#include "cpu/product.h"

#include "base/error.h"
#include "cpu/rounding.h"
#include "cpu/thread_memory.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

namespace torch_ort::cpu {

namespace {

// A panel of the right factor, kDepth numbers deep, stays in the first cache while the rows of a
// block of the left one pass by; these come from the second cache. Multiples of what the register
// kernels of all instruction sets take at once.
constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRows = 960;
constexpr int64_t kBlockColumns = 384;

constexpr int64_t kFewRows = 96;  // that packing a panel of the right factor does not pay for

constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
constexpr int64_t kMostOfPairs = 1 << 25;    // the same

// The matrices of an operand.
struct Matrices {
  ir::DType dtype = ir::DType::kUndefined;
  int64_t rows = 0, columns = 0;
  int64_t row = 0, column = 0;   // strides, in elements
  std::vector<int64_t> batches;  // strides of the dims before

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

  // With rows for columns.
  Matrices turned() const {
    Matrices other = *this;
    std::swap(other.rows, other.columns);
    std::swap(other.row, other.column);
    return other;
  }
  // In bytes.
  int64_t offset(int64_t i, int64_t j) const {
    return (i * row + j * column) * ir::size_bytes(dtype);
  }
};

// Rows and columns of the result.
struct Rectangle {
  int64_t row, rows, column, columns;
};

// How threads share a matrix: blocks of whole tiles, as near to squares as their number allows, so
// that little is packed twice.
struct Grid {
  int64_t rows = 1, columns = 1;  // how many parts
  int64_t part_rows = 0, part_columns = 0;

  Grid(int64_t m, int64_t n, int64_t threads, int64_t tile_rows, int64_t tile_columns) {
    int64_t least = -1;
    for (int64_t parts = 1; parts <= threads; ++parts) {
      const int64_t height = round_up(ceil_div(m, parts), tile_rows);
      const int64_t width = round_up(ceil_div(n, threads / parts), tile_columns);
      // What a thread multiplies for each number of a row, and then what it packs.
      const int64_t cost = height * width * 64 + (height + width);
      if (least >= 0 && cost >= least) continue;
      least = cost;
      part_rows = height;
      part_columns = width;
    }
    rows = ceil_div(m, part_rows);
    columns = ceil_div(n, part_columns);
  }
};

template <typename T>
class ProductKernel final : public Kernel {
 public:
  ProductKernel(const region::Product& product, Isa isa)
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
    // The register kernel writes rows: a result by columns is that of the factors turned over.
    if (c_.column != 1 && c_.row == 1) {
      is_turned_ = true;
      const Matrices a = a_.turned();
      a_ = b_.turned();
      b_ = a;
      c_ = c_.turned();
      start_ = start_.turned();
    }
    b_turned_ = b_.turned();
    m_ = c_.rows;
    n_ = c_.columns;
    k_ = a_.columns;
    writes_directly_ = c_.dtype == kDType && (c_.column == 1 || n_ == 1);
    reads_start_ = has_start_ && start_.dtype == kDType && start_.column == 1 && writes_directly_;
    reads_right_ = b_.dtype == kDType && b_.column == 1;
    packs_left_ = pairs_ != nullptr ? a_.column != 1 || a_.row % 2 != 0 || k_ % 2 != 0
                                    : a_.dtype != kDType || (a_.column != 1 && a_.row != 1);
  }

  std::string str() const override {
    return concat("product, ", num_batches_ == 1 ? "" : concat(num_batches_, " times "), m_, " x ",
                  k_, " x ", n_, " of ", ir::name(c_.dtype), is_turned_ ? ", turned" : "",
                  has_start_ ? ", added to" : "", "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    if (num_batches_ == 0 || m_ == 0 || n_ == 0) return;
    const int64_t work = m_ * n_ * std::max<int64_t>(k_, 1);
    const int64_t wanted =
        std::clamp<int64_t>(work * num_batches_ / kWorkPerThread, 1, at::get_num_threads());
    const Grid grid(m_, n_, ceil_div(wanted, num_batches_), kernels_.product_rows,
                    kernels_.panel_width);
    const int64_t parts = grid.rows * grid.columns, all = parts * num_batches_;
    at::parallel_for(0, all, ceil_div(all, wanted), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts;
        const int64_t row = part / grid.columns * grid.part_rows;
        const int64_t column = part % grid.columns * grid.part_columns;
        multiply(matrices_of(i / parts, inputs, outputs),
                 {row, std::min(grid.part_rows, m_ - row), column,
                  std::min(grid.part_columns, n_ - column)});
      }
    });
  }

 private:
  static constexpr ir::DType kDType =
      std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

  // The matrices of one place in the batch.
  struct Addresses {
    const char *a, *b, *start;
    char* c;
  };

  void check_batches(const Layout& layout) const {
    ORT_CHECK(layout.sizes.size() == sizes_.size() + 2, "product: got an operand of ",
              layout.sizes.size(), " dims, want ", sizes_.size() + 2);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      ORT_CHECK(layout.sizes[i] == sizes_[i] || layout.sizes[i] == 1, "product: dim ", i, ": got ",
                layout.sizes[i], ", want ", sizes_[i]);
    }
  }

  Addresses matrices_of(int64_t batch, const void* const* inputs, void* const* outputs) const {
    const auto offset = [&](const Matrices& matrices) {
      int64_t elements = 0, rest = batch;
      for (size_t i = sizes_.size(); i-- > 0; rest /= sizes_[i]) {
        elements += rest % sizes_[i] * matrices.batches[i];
      }
      return elements * ir::size_bytes(matrices.dtype);
    };
    const auto input = [&](int i, const Matrices& matrices) {
      return static_cast<const char*>(inputs[i]) + offset(matrices);
    };
    return {.a = input(is_turned_ ? 1 : 0, a_),
            .b = input(is_turned_ ? 0 : 1, b_),
            .start = has_start_ ? input(2, start_) : nullptr,
            .c = static_cast<char*>(outputs[0]) + offset(c_)};
  }

  // The result there.
  void multiply(const Addresses& at, const Rectangle& all) const {
    for (int64_t j = 0; j < all.columns; j += kBlockColumns) {
      for (int64_t i = 0; i < all.rows; i += kBlockRows) {
        const Rectangle block{all.row + i, std::min(kBlockRows, all.rows - i), all.column + j,
                              std::min(kBlockColumns, all.columns - j)};
        if (writes_directly_) {
          multiply_block(at, block, reinterpret_cast<T*>(at.c + c_.offset(block.row, block.column)),
                         c_.row);
        } else {
          T* sums = thread_memory<T, Use::kProduct>(block.rows * block.columns);
          multiply_block(at, block, sums, block.columns);
          store(at, block, sums);
        }
      }
    }
  }

  void store(const Addresses& at, const Rectangle& block, const T* sums) const {
    kernels_.store[static_cast<size_t>(c_.dtype)](
        at.c + c_.offset(block.row, block.column), sums,
        {.n = block.columns, .stride = c_.column, .count = block.rows, .distance = c_.row});
  }

  void multiply_block(const Addresses& at, const Rectangle& block, T* c, int64_t c_row) const {
    const T* start = nullptr;
    int64_t start_row = 0;
    if (reads_start_) {
      start = reinterpret_cast<const T*>(at.start + start_.offset(block.row, block.column));
      start_row = start_.row;
    } else if (has_start_) {
      for (int64_t i = 0; i < block.rows; ++i) {
        kernels_.load[static_cast<size_t>(start_.dtype)](
            c + i * c_row, at.start + start_.offset(block.row + i, block.column),
            {.n = block.columns, .stride = start_.column});
      }
      start = c;
      start_row = c_row;
    }
    const int64_t wide = kernels_.panel_width;
    const int64_t at_once = pairs_ != nullptr ? 2 : 1;  // numbers of a factor in a step
    for (int64_t p = 0; p == 0 || p < k_; p += at_once * kDepth) {
      const int64_t depth = std::min(at_once * kDepth, k_ - p);
      const int64_t steps = ceil_div(depth, at_once);
      const T* left = nullptr;
      if (packs_left_) {
        const int64_t rows = kernels_.product_rows;
        T* packed = thread_memory<T, Use::kLeft>(round_up(block.rows, rows) * steps);
        for (int64_t i = 0; i < block.rows; i += rows) {
          pack(packed + i * steps, at.a, a_, block.row + i, std::min(rows, block.rows - i), p,
               depth, rows);
        }
        left = packed;
      } else {
        left = reinterpret_cast<const T*>(at.a + a_.offset(block.row, p));
      }
      // Each panel of the right factor is packed into the same memory, which stays in the first
      // cache, just before the rows of the left one need it.
      T* right = thread_memory<T, Use::kRight>(wide * steps);
      for (int64_t j = 0; j < block.columns; j += wide) {
        const int64_t columns = std::min(wide, block.columns - j);
        const int64_t width = columns <= wide / 2 ? wide / 2 : wide;
        const bool packs = columns != width || !reads_right_ || block.rows > kFewRows;
        if (packs) pack(right, at.b, b_turned_, block.column + j, columns, p, depth, width);
        const char* there = at.b + b_.offset(p, block.column + j);
        multiply_panel({.c = c + j,
                        .c_row = c_row,
                        .start = start == nullptr ? nullptr : start + j,
                        .start_row = start_row,
                        .a = left,
                        .a_row = a_.row / at_once,
                        .a_column = a_.column,
                        .a_is_packed = packs_left_,
                        .b = packs ? right : reinterpret_cast<const T*>(there),
                        .b_row = packs ? width : b_.row,
                        .b_panel = width * steps,
                        .width = width,
                        .num_panels = 1,
                        .columns = columns,
                        .m = block.rows,
                        .k = steps});
      }
      start = c;
      start_row = c_row;
    }
  }

  void multiply_panel(const PanelProduct<T>& product) const {
    if constexpr (std::is_same_v<T, float>) {
      if (pairs_ != nullptr) return pairs_->multiply(product);
    }
    kernels_.multiply(product);
  }

  // A panel of `count` rows of a factor, and of its columns [p, p + depth).
  void pack(T* to, const char* base, const Matrices& factor, int64_t row, int64_t count, int64_t p,
            int64_t depth, int64_t width) const {
    const char* from = base + factor.offset(row, p);
    if constexpr (std::is_same_v<T, float>) {
      if (pairs_ != nullptr) {
        pairs_->pack({.to = to,
                      .width = width,
                      .numbers = depth,
                      .from = reinterpret_cast<const uint16_t*>(from),
                      .across = factor.row,
                      .along = factor.column,
                      .count = count});
        return;
      }
    }
    Packing<T> packing{.to = to,
                       .width = width,
                       .steps = depth,
                       .from = reinterpret_cast<const T*>(from),
                       .across = factor.row,
                       .along = factor.column,
                       .count = count};
    if (factor.dtype != kDType) {
      const bool is_along = factor.column == 1;
      T* numbers = thread_memory<T, Use::kConverted>(count * depth);
      kernels_.load[static_cast<size_t>(factor.dtype)](
          numbers, from,
          {.n = is_along ? depth : count,
           .stride = is_along ? 1 : factor.row,
           .count = is_along ? count : depth,
           .distance = is_along ? factor.row : factor.column});
      packing.from = numbers;
      packing.across = is_along ? depth : 1;
      packing.along = is_along ? 1 : count;
    }
    kernels_.pack(packing);
  }

  const Kernels<T>& kernels_;
  const PairKernels* pairs_;  // nullptr: numbers of bfloat16 are multiplied as those of float32
  Matrices c_, a_, b_, b_turned_, start_;
  std::vector<int64_t> sizes_;  // of the batch
  int64_t num_batches_ = 1, m_ = 0, n_ = 0, k_ = 0;
  bool has_start_ = false;
  bool is_turned_ = false;        // a and b stand for each other
  bool writes_directly_ = false;  // c is what the register kernel writes
  bool reads_start_ = false;      // and the start what it reads
  bool reads_right_ = false;      // the register kernel can read b where it lies
  bool packs_left_ = false;       // the register kernel reads it where it lies otherwise
};

}  // namespace

namespace {

// bfloat16 and float16 are multiplied in float32.
bool is_short_or_float32(ir::DType dtype) {
  return dtype == ir::DType::kFloat || dtype == ir::DType::kBFloat16 || dtype == ir::DType::kHalf;
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
  // A vector times a matrix reads each number once: there is nothing to pack for.
  if (m == 1 || n == 1) return false;
  // The library that torch has for bfloat16 takes long to begin, and is some 7% faster then.
  return product.result.dtype != ir::DType::kBFloat16 || pair_kernels(isa) == nullptr ||
         m * k * n <= kMostOfPairs;
}

std::unique_ptr<const Kernel> make_product(const region::Product& product, Isa isa) {
  const ir::DType dtype = product.result.dtype;
  const bool is_mixed = is_short_or_float32(dtype) && is_short_or_float32(product.a.dtype) &&
                        is_short_or_float32(product.b.dtype) &&
                        (!product.start || is_short_or_float32(product.start->dtype));
  if (!is_of_floats(product) && !is_mixed) {
    throw Unsupported(concat("product: got ", ir::name(product.a.dtype), " and ",
                             ir::name(product.b.dtype), " for ", ir::name(dtype),
                             ", want one dtype of floats"));
  }
  if (dtype == ir::DType::kDouble) {
    return std::make_unique<const ProductKernel<double>>(product, isa);
  }
  return std::make_unique<const ProductKernel<float>>(product, isa);
}

}  // namespace torch_ort::cpu
