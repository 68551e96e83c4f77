#include "cuda/embedding.h"

#include "base/error.h"
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/embedding_text.h"
#include "cuda/faults.h"
#include "cuda/once.h"
#include "cuda/stream.h"
#include "ops/embedding_grad.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ir::DType;
using ops::EmbeddingWorkspace;
using region::Layout;

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Numbers and structs that embedding.cuh has too.
constexpr int64_t kWarps = 8, kThreads = 32 * kWarps, kRows = 32;
constexpr int64_t kTile = EmbeddingWorkspace::kSortedIds, kBins = EmbeddingWorkspace::kDigits;
constexpr int64_t kPart = EmbeddingWorkspace::kPartRows;
constexpr int64_t kDigitBits = 9;
static_assert(int64_t{1} << kDigitBits == kBins);
constexpr uint32_t kSortBytes = 4 * (kBins + kWarps * kBins + kWarps);
constexpr uint32_t kBoundBytes = (kRows + 1 + 3) / 4 * 16;
constexpr size_t kMostAxes = 64;

struct Axes {
  std::array<int64_t, kMostAxes> sizes = {}, strides = {};
  int32_t count = 0, unused = 0;
};
struct Sorted {
  std::array<uint32_t*, 2> keys = {}, numbers = {};
  uint32_t* counts = nullptr;
};

// A single block sorts so many ids. For more, launches of many blocks take less time.
constexpr int64_t kFewIds = 2 * kTile;
constexpr int64_t kMostSortBlocks = 256;
// Columns are divided into strips until there are so many blocks. Most parts do not exist, and
// their blocks end at once.
constexpr int64_t kTableBlocks = 1024, kPartBlocks = 4096;
constexpr int64_t kVectorBytes = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t product(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

// Merges dims that have one distance between all their elements, and drops dims of size 1.
Axes axes_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::vector<std::pair<int64_t, int64_t>> merged;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    if (!merged.empty() && merged.back().second == sizes[i] * strides[i]) {
      merged.back() = {merged.back().first * sizes[i], strides[i]};
    } else {
      merged.emplace_back(sizes[i], strides[i]);
    }
  }
  if (merged.empty()) merged.emplace_back(1, 0);
  if (merged.size() > kMostAxes) {
    throw Unsupported(concat("EmbeddingGrad: dims of the ids: got ", merged.size(),
                             " that are not contiguous, want at most ", kMostAxes));
  }
  Axes axes;
  axes.count = static_cast<int32_t>(merged.size());
  for (size_t i = 0; i < merged.size(); ++i) {
    std::tie(axes.sizes.at(i), axes.strides.at(i)) = merged[i];
  }
  return axes;
}

template <typename... Given>
void start(const Function& kernel, int64_t blocks, Dim3 threads, int64_t shared_bytes, void* stream,
           Given... given) {
  if (blocks > kMost) {
    throw Unsupported(
        concat("EmbeddingGrad: blocks of a launch: got ", blocks, ", want at most ", kMost));
  }
  std::array<void*, sizeof...(Given)> arguments = {static_cast<void*>(&given)...};
  const Launch launch{.grid = {static_cast<uint32_t>(blocks)},
                      .block = threads,
                      .shared_bytes = static_cast<uint32_t>(shared_bytes),
                      .stream = stream};
  Driver::get().launch(kernel, launch, arguments.data());
}

// The sizes of one node.
struct Problem {
  Problem(const ir::Node& node, const Layout& gradient, const Layout& ids, const Layout& table)
      : dtype(gradient.dtype),
        of_ids(ids.dtype),
        num_ids(product(ids.sizes)),
        rows(table.sizes.at(0)),
        columns(table.sizes.at(1)),
        padding(ir::int_attr(node.attrs, "padding_idx", -1)),
        column_stride(gradient.strides.back()),
        id_axes(axes_of(ids.sizes, ids.strides)),
        row_axes(axes_of(ids.sizes, {gradient.strides.begin(), gradient.strides.end() - 1})) {
    if (num_ids > kMost || rows > kMost) {
      throw Unsupported(concat("EmbeddingGrad: got ", num_ids, " ids and ", rows,
                               " rows, want at most ", kMost, " of each"));
    }
    // The number of rows takes the place of an id that is out of bounds.
    const int64_t bits_of_id = std::bit_width(static_cast<uint64_t>(rows) | 1);
    num_digits = static_cast<int32_t>(ceil_div(bits_of_id, kDigitBits));
    bits = static_cast<int32_t>(ceil_div(bits_of_id, num_digits));
    ids_of_block =
        ceil_div(std::max<int64_t>(1, ceil_div(num_ids, kMostSortBlocks)), kTile) * kTile;
    const EmbeddingWorkspace space = ops::embedding_workspace(num_ids, columns, dtype);
    counts_at = space.parts_bytes.constant();
    arrays_at = counts_at + space.counts_bytes.constant();
    array_bytes = space.array_bytes.constant();
    workspace_bytes = space.bytes().constant();
  }

  bool is_double() const { return dtype == DType::kDouble; }
  bool has_table() const { return rows > 0 && columns > 0; }
  int64_t sort_blocks() const { return ceil_div(num_ids, ids_of_block); }
  // Ids that have no more rows than a part need no parts.
  int64_t num_parts() const { return num_ids > kPart ? 2 * ceil_div(num_ids, kPart) : 0; }

  // How many columns can be read and written at once.
  int64_t vector() const {
    int64_t vector = column_stride == 1 ? kVectorBytes / ir::size_bytes(dtype) : 1;
    const auto is_divided = [&] {
      if (columns % vector != 0) return false;
      for (int32_t i = 0; i < row_axes.count; ++i) {
        if (row_axes.strides.at(i) % vector != 0) return false;
      }
      return true;
    };
    while (vector > 1 && !is_divided()) vector /= 2;
    return vector;
  }

  DType dtype, of_ids;
  int64_t num_ids, rows, columns, padding, column_stride;
  Axes id_axes, row_axes;
  int32_t num_digits = 0, bits = 0;
  int64_t ids_of_block = 0;
  int64_t counts_at = 0, arrays_at = 0, array_bytes = 0, workspace_bytes = 0;
};

struct Workspace {
  Sorted sorted;
  void* parts;

  Workspace(const Problem& of, void* at) : parts(at) {
    auto* bytes = static_cast<char*>(at);
    sorted.counts = reinterpret_cast<uint32_t*>(bytes + of.counts_at);
    for (size_t i = 0; i < 4; ++i) {
      auto* array = reinterpret_cast<uint32_t*>(bytes + of.arrays_at +
                                                static_cast<int64_t>(i) * of.array_bytes);
      (i < 2 ? sorted.keys : sorted.numbers).at(i % 2) = array;
    }
  }
};

// A module with the kernels that were found in it.
class Kernels {
 public:
  Kernels(const EmbeddingText& text, const region::CodegenOptions& options)
      : module_(build(text.name, text.text, {.dump_dir = options.dump_dir}, options.device)) {}
  const Function& operator[](const char* name) const { return module_->function(name); }

 private:
  std::shared_ptr<const Module> module_;
};

// Sorts the ids of a node.
class Sort {
 public:
  Sort(const Problem& problem, const region::CodegenOptions& options)
      : of_(problem), device_(options.device), kernels_(sort_text(problem.of_ids), options) {}

  void run(const void* ids, const Sorted& to, void* stream) const {
    const auto num_ids = static_cast<uint32_t>(of_.num_ids);
    const auto rows = static_cast<uint32_t>(of_.rows);
    void* const fault = faults(device_).word();
    if (of_.num_ids <= kFewIds) {
      start(kernels_["embedding_sort"], 1, {kThreads}, kSortBytes, stream, ids, of_.id_axes, rows,
            fault, num_ids, of_.num_digits, of_.bits, to);
      return;
    }
    const int64_t blocks = of_.sort_blocks();
    const auto of_block = static_cast<uint32_t>(of_.ids_of_block);
    start(kernels_["embedding_count_ids"], blocks, {kThreads}, kSortBytes, stream, ids, of_.id_axes,
          rows, fault, num_ids, of_block, 0, of_.bits, to.counts);
    start(kernels_["embedding_place_ids"], blocks, {kThreads}, kSortBytes, stream, ids, of_.id_axes,
          rows, fault, num_ids, of_block, 0, of_.bits, to.counts, to.keys[0], to.numbers[0]);
    for (int32_t digit = 1; digit < of_.num_digits; ++digit) {
      const size_t from = (digit - 1) % 2, into = digit % 2;
      const int32_t shift = digit * of_.bits;
      start(kernels_["embedding_count_keys"], blocks, {kThreads}, kSortBytes, stream, to.keys[from],
            to.numbers[from], num_ids, of_block, shift, of_.bits, to.counts);
      start(kernels_["embedding_place_keys"], blocks, {kThreads}, kSortBytes, stream, to.keys[from],
            to.numbers[from], num_ids, of_block, shift, of_.bits, to.counts, to.keys[into],
            to.numbers[into]);
    }
  }

 private:
  const Problem& of_;
  int device_;
  Kernels kernels_;
};

// Adds the rows of sorted ids, with so many columns at a time.
class Sums {
 public:
  Sums(const Problem& problem, int64_t vector, const region::CodegenOptions& options)
      : of_(problem),
        vector_(vector),
        kernels_(sums_text({.dtype = problem.dtype,
                            .vector = vector,
                            .is_run = problem.row_axes.count == 1,
                            .wide_index = problem.columns > kMost - kMargin}),
                 options) {}

  // Whether the addresses are aligned to vectors.
  bool takes(const void* gradient, const void* table) const {
    const auto bytes = static_cast<uintptr_t>(vector_ * ir::size_bytes(of_.dtype));
    return (reinterpret_cast<uintptr_t>(gradient) | reinterpret_cast<uintptr_t>(table)) % bytes ==
           0;
  }

  void run(const void* gradient, const Workspace& space, void* table, void* stream) const {
    const size_t last = (of_.num_digits - 1) % 2;
    const uint32_t *keys = space.sorted.keys.at(last), *numbers = space.sorted.numbers.at(last);
    const int64_t line = 32 * vector_, lines = ceil_div(of_.columns, line);
    const int64_t sum_bytes = kWarps * line * (of_.is_double() ? 8 : 4);
    const auto launch = [&](const char* name, int64_t blocks, int64_t wanted_blocks,
                            int64_t shared_bytes, auto... given) {
      const int64_t of_strip = ceil_div(lines, std::min(lines, ceil_div(wanted_blocks, blocks)));
      const int64_t strips = ceil_div(lines, of_strip), width = of_strip * line;
      start(kernels_[name], blocks * strips, {32, kWarps}, shared_bytes, stream, gradient,
            of_.row_axes, of_.column_stride, keys, numbers, static_cast<uint32_t>(of_.num_ids),
            static_cast<uint32_t>(of_.rows), padding(), of_.columns, static_cast<uint32_t>(strips),
            width, given...);
    };
    if (const int64_t parts = of_.num_parts(); parts > 0) {
      launch("embedding_parts", parts, kPartBlocks, sum_bytes, space.parts);
    }
    launch("embedding_table", ceil_div(of_.rows, kRows), kTableBlocks, kBoundBytes + sum_bytes,
           static_cast<const void*>(space.parts), table);
  }

 private:
  // Kernels count columns a little beyond the end.
  static constexpr int64_t kMargin = 1 << 20;

  // A row that gets zeros; the largest number if there is none.
  uint32_t padding() const {
    const bool is_row = of_.padding >= 0 && of_.padding < of_.rows;
    return is_row ? static_cast<uint32_t>(of_.padding) : std::numeric_limits<uint32_t>::max();
  }

  const Problem& of_;
  int64_t vector_;
  Kernels kernels_;
};

class EmbeddingGradKernel final : public region::Kernel {
 public:
  EmbeddingGradKernel(const Problem& problem, const region::CodegenOptions& options)
      : problem_(problem),
        options_(options),
        sort_(problem_, options),
        usual_(problem_, problem_.vector(), options) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    faults(options_.device).check();
    void* const stream = current_stream(options_.device);
    const Workspace space(problem_, outputs[1]);
    if (problem_.num_ids > 0) sort_.run(inputs[1], space.sorted, stream);
    if (problem_.has_table()) {
      sums(inputs[0], outputs[0]).run(inputs[0], space, outputs[0], stream);
    }
    if (!options_.synchronize) return;
    Driver::get().synchronize(options_.device, stream, "embedding gradient");
    faults(options_.device).check();
  }

  std::string str() const override {
    return concat("embedding gradient, ", problem_.num_ids, " ids, table ", problem_.rows, " x ",
                  problem_.columns, "\nsort by ", problem_.num_digits, " digits of ", problem_.bits,
                  " bits, columns by ", problem_.vector(), "\n");
  }

 private:
  // If an address is not aligned, a second text reads each element by itself.
  const Sums& sums(const void* gradient, const void* table) const {
    if (usual_.takes(gradient, table)) return usual_;
    return *narrow_.get([this] { return std::make_unique<Sums>(problem_, 1, options_); });
  }

  Problem problem_;
  region::CodegenOptions options_;
  Sort sort_;
  Sums usual_;
  mutable Once<std::unique_ptr<Sums>> narrow_;
};

}  // namespace

std::unique_ptr<const region::Kernel> make_embedding_grad(const ir::Node& node,
                                                          const std::vector<Layout>& inputs,
                                                          const std::vector<Layout>& outputs,
                                                          const region::CodegenOptions& options) {
  ORT_CHECK(inputs.size() == 2 && outputs.size() == 2, "EmbeddingGrad: got ", outputs.size(),
            " results, want a table and a workspace");
  const Layout &gradient = inputs[0], &ids = inputs[1], &table = outputs[0], &space = outputs[1];
  ORT_CHECK(table.sizes.size() == 2, "EmbeddingGrad: got a table of ", table.sizes.size(),
            " dims, want 2");
  const int64_t rows = table.sizes[0], columns = table.sizes[1];
  const bool is_row_major = rows * columns == 0 || ((rows == 1 || table.strides[0] == columns) &&
                                                    (columns == 1 || table.strides[1] == 1));
  std::vector<int64_t> row_of_each_id = ids.sizes;
  row_of_each_id.push_back(columns);
  ORT_CHECK(is_row_major && gradient.sizes == row_of_each_id &&
                (ids.dtype == DType::kInt64 || ids.dtype == DType::kInt32) &&
                gradient.dtype == table.dtype && ir::is_float(gradient.dtype),
            "EmbeddingGrad: the operands do not fit together");
  const Problem problem(node, gradient, ids, table);
  ORT_CHECK(
      space.dtype == DType::kUInt8 && space.sizes == std::vector<int64_t>{problem.workspace_bytes},
      "EmbeddingGrad: the workspace does not fit, want ", problem.workspace_bytes, " bytes");
  return std::make_unique<EmbeddingGradKernel>(problem, options);
}

}  // namespace torch_ort::cuda
