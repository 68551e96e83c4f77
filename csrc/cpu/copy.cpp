// Copies that PyTorch's is slow at:
// - to another layout whose rows are the columns of the first one, such as images to channels last
//   and back. PyTorch reads or writes single numbers there: 8 GB/s with one thread on a Zen 5,
//   where blocks that are transposed in registers come to 40 or more, and to 22 beyond the caches;
// - of few bytes, such as one time of a sequence, which take less time than PyTorch's preparations.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "region/paired_axes.h"

#include <algorithm>
#include <cstring>

namespace torch_ort::cpu {

namespace {

using Axis = region::PairedAxis;  // a: of what is copied; b: of the copy

// A block of rows and columns is read and written by one thread.
constexpr int64_t kBlock = 64;
constexpr int64_t kBlocksPerThread = 4;
// Smaller tensors are in the first-level cache, and with fewer rows or columns vectors are mostly
// empty.
constexpr int64_t kLeastNumbers = 1 << 12;
constexpr int64_t kLeastRows = 4;

// Matrices that are transposed: number i of a row j becomes number j of row i of the copy.
struct Matrices {
  Axis rows, columns;
  std::vector<Axis> batch;
  int64_t count = 1;  // of matrices
};

std::vector<Axis> axes_of(const Layout& from, const Layout& to) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < from.sizes.size(); ++i) {
    axes.push_back({from.sizes[i], from.strides[i], to.strides[i]});
  }
  return axes;
}

std::optional<Matrices> matrices_of(const Layout& from, const Layout& to) {
  const std::vector<Axis> axes = region::merge(axes_of(from, to));
  const auto rows =
      std::find_if(axes.begin(), axes.end(), [](const Axis& each) { return each.b == 1; });
  const auto columns =
      std::find_if(axes.begin(), axes.end(), [](const Axis& each) { return each.a == 1; });
  if (rows == axes.end() || columns == axes.end() || rows == columns) return std::nullopt;
  Matrices found{.rows = *rows, .columns = *columns};
  if (std::min(rows->size, columns->size) < kLeastRows) return std::nullopt;
  for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
    if (axis == rows || axis == columns) continue;
    found.batch.push_back(*axis);
    found.count *= axis->size;
  }
  if (found.count * rows->size * columns->size < kLeastNumbers) return std::nullopt;
  return found;
}

// T has the size of an element, whose bits are moved.
template <typename T>
class TransposingCopy final : public Kernel {
 public:
  TransposingCopy(Matrices matrices, Isa isa)
      : it_(std::move(matrices)),
        kernels_(kernels<T>(isa)),
        row_blocks_(ceil_div(it_.rows.size, kBlock)),
        column_blocks_(ceil_div(it_.columns.size, kBlock)) {}

  std::string str() const override {
    return concat("transposing copy, ", it_.count, " of ", it_.rows.size, " x ", it_.columns.size,
                  "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* from = static_cast<const T*>(inputs[0]);
    auto* to = static_cast<T*>(outputs[0]);
    const int64_t of_matrix = row_blocks_ * column_blocks_;
    parallel_for(0, it_.count * of_matrix, kBlocksPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t within = block % of_matrix;
        const int64_t row = within % row_blocks_ * kBlock, column = within / row_blocks_ * kBlock;
        const auto [a, b] = region::offsets_of(it_.batch, block / of_matrix);
        kernels_.transpose({.to = to + b + row + column * it_.columns.b,
                            .to_row = it_.columns.b,
                            .from = from + a + row * it_.rows.a + column,
                            .from_row = it_.rows.a,
                            .rows = std::min(kBlock, it_.rows.size - row),
                            .columns = std::min(kBlock, it_.columns.size - column)});
      }
    });
  }

 private:
  const Matrices it_;
  const Kernels<T>& kernels_;
  const int64_t row_blocks_, column_blocks_;
};

// Copies of up to so many bytes take less time than PyTorch needs to prepare one.
constexpr int64_t kFewBytes = 1 << 14;

// T has the size of an element, as above.
template <typename T>
class SmallCopy final : public Kernel {
 public:
  SmallCopy(std::vector<Axis> axes, int64_t count) : outer_(std::move(axes)) {
    if (!outer_.empty()) {
      inner_ = outer_.back();
      outer_.pop_back();
    }
    num_runs_ = count / std::max<int64_t>(1, inner_.size);
  }

  std::string str() const override {
    return concat("copy, ", num_runs_, " runs of ", inner_.size, "\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    for (int64_t run = 0; run < num_runs_; ++run) {
      const auto [a, b] = region::offsets_of(outer_, run);
      const T* from = static_cast<const T*>(inputs[0]) + a;
      T* to = static_cast<T*>(outputs[0]) + b;
      if (inner_.a == 1 && inner_.b == 1) {
        std::memcpy(to, from, static_cast<size_t>(inner_.size) * sizeof(T));
      } else {
        for (int64_t i = 0; i < inner_.size; ++i) to[i * inner_.b] = from[i * inner_.a];
      }
    }
  }

 private:
  std::vector<Axis> outer_;
  Axis inner_{.size = 1, .a = 1, .b = 1};
  int64_t num_runs_ = 0;
};

std::unique_ptr<const Kernel> make_small_copy(const Layout& from, const Layout& to) {
  std::vector<Axis> axes = axes_of(from, to);
  int64_t count = 1;
  for (const Axis& axis : axes) count *= axis.size;
  const int64_t bytes = ir::size_bytes(from.dtype);
  if (count >= kFewBytes / bytes) return nullptr;
  // The copy is written in the order of its memory.
  std::stable_sort(axes.begin(), axes.end(),
                   [](const Axis& x, const Axis& y) { return x.b > y.b; });
  axes = region::merge(axes);
  switch (bytes) {
    case 1: return std::make_unique<const SmallCopy<uint8_t>>(std::move(axes), count);
    case 2: return std::make_unique<const SmallCopy<uint16_t>>(std::move(axes), count);
    case 4: return std::make_unique<const SmallCopy<uint32_t>>(std::move(axes), count);
    case 8: return std::make_unique<const SmallCopy<uint64_t>>(std::move(axes), count);
    default: return nullptr;
  }
}

}  // namespace

std::unique_ptr<const Kernel> make_copy(const Layout& from, const Layout& to, Isa isa) {
  ORT_CHECK(from.dtype == to.dtype && from.sizes == to.sizes,
            "copy: got tensors of different dtypes or sizes");
  if (auto small = make_small_copy(from, to)) return small;
  const int64_t bytes = ir::size_bytes(from.dtype);
  if (bytes != sizeof(float) && bytes != sizeof(double)) return nullptr;
  std::optional<Matrices> found = matrices_of(from, to);
  if (!found) return nullptr;
  if (bytes == sizeof(float)) {
    return std::make_unique<const TransposingCopy<float>>(*std::move(found), isa);
  }
  return std::make_unique<const TransposingCopy<double>>(*std::move(found), isa);
}

}  // namespace torch_ort::cpu
