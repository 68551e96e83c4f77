#include "cuda/sorted_sums.h"

#include "base/error.h"
#include "base/rounding.h"
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/faults.h"
#include "cuda/once.h"
#include "cuda/sorted_sums_text.h"
#include "cuda/stream.h"
#include "ops/sorted_sums.h"
#include "region/bound_schedule.h"
#include "region/paired_axes.h"

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
using ops::SortedSumsWorkspace;
using region::Layout;

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Numbers and structs that sorted_sums.cuh has too.
constexpr int64_t kWarps = 8, kThreads = 32 * kWarps, kRows = 32;
constexpr int64_t kTile = SortedSumsWorkspace::kSortedIds, kBins = SortedSumsWorkspace::kDigits;
constexpr int64_t kPart = SortedSumsWorkspace::kPartRows;
constexpr int64_t kDigitBits = 9;
static_assert(int64_t{1} << kDigitBits == kBins);
constexpr uint32_t kSortBytes = 4 * (kBins + kWarps * kBins + kWarps);
constexpr uint32_t kBoundBytes = (kRows + 1 + 3) / 4 * 16;
constexpr size_t kMostAxes = 64;

struct Axes {
  std::array<int64_t, kMostAxes> sizes = {}, strides = {};
  int32_t count = 0, unused = 0;
};
struct Columns {
  Axes from;
  std::array<int64_t, kMostAxes> to = {};
  int64_t to_row = 0;
};
struct Sorted {
  std::array<uint32_t*, 2> keys = {}, numbers = {};
  uint32_t* counts = nullptr;
};
struct Digits {
  int32_t begin, end, bits, what;
};
constexpr int32_t kCount = 1, kPlace = 2;

// A single block sorts so many ids. For more, launches of many blocks take less time.
constexpr int64_t kFewIds = 2 * kTile;
constexpr int64_t kMostSortBlocks = 256;
// Columns are divided into strips until there are so many blocks. Most parts do not exist, and
// their blocks end at once.
constexpr int64_t kTableBlocks = 1024, kPartBlocks = 4096;
constexpr int64_t kVectorBytes = 16;

using Axis = region::PairedAxis;  // a: of the gradient, b: of the table

Columns columns_of(const std::string& op, const std::vector<Axis>& axes, int64_t to_row) {
  std::vector<Axis> merged = region::merge(axes);
  if (merged.empty()) merged.push_back({1, 1, 1});
  if (merged.size() > kMostAxes) {
    throw Unsupported(concat(op, ": dims of an operand: got ", merged.size(),
                             " that are not contiguous, want at most ", kMostAxes));
  }
  Columns columns;
  columns.from.count = static_cast<int32_t>(merged.size());
  columns.to_row = to_row;
  for (size_t i = 0; i < merged.size(); ++i) {
    columns.from.sizes.at(i) = merged[i].size;
    columns.from.strides.at(i) = merged[i].a;
    columns.to.at(i) = merged[i].b;
  }
  return columns;
}

Axes axes_of(const std::string& op, const std::vector<int64_t>& sizes, const int64_t* strides) {
  std::vector<Axis> axes;
  for (size_t i = 0; i < sizes.size(); ++i) axes.push_back({sizes[i], strides[i], 0});
  return columns_of(op, axes, 0).from;
}

template <typename... Given>
void start(const Function& kernel, int64_t blocks, Dim3 threads, int64_t shared_bytes, void* stream,
           Given... given) {
  if (blocks > kMost) {
    throw Unsupported(
        concat("sums by ids: blocks of a launch: got ", blocks, ", want at most ", kMost));
  }
  const Launch launch{.grid = {static_cast<uint32_t>(blocks)},
                      .block = threads,
                      .shared_bytes = static_cast<uint32_t>(shared_bytes),
                      .stream = stream};
  Driver::get().start(kernel, launch, given...);
}

// The layouts of one node. Ids select along the dim `axis` of the table; all others are columns.
struct Problem {
  Problem(const ir::Node& node, const Layout& gradient, const Layout& ids, const Layout& table)
      : name(node.op.name),
        dtype(gradient.dtype),
        of_ids(ids.dtype),
        num_ids(region::num_elements(ids)),
        counts_from_end(ir::int_attr(node.attrs, "from_end", 0) != 0),
        padding(ir::int_attr(node.attrs, "padding_idx", -1)) {
    const auto axis = static_cast<size_t>(ir::int_attr(node.attrs, "axis", 0));
    const size_t rank = table.sizes.size(), behind = axis + ids.sizes.size();
    ORT_CHECK(axis < rank, name, ": got axis ", axis, " of ", rank, " dims");
    std::vector<int64_t> sizes = table.sizes;
    sizes.erase(sizes.begin() + static_cast<int64_t>(axis));
    sizes.insert(sizes.begin() + static_cast<int64_t>(axis), ids.sizes.begin(), ids.sizes.end());
    ORT_CHECK(gradient.sizes == sizes && gradient.dtype == table.dtype && ir::is_float(dtype) &&
                  (of_ids == DType::kInt64 || of_ids == DType::kInt32),
              name, ": the operands do not fit together");
    rows = table.sizes[axis];
    std::vector<Axis> others;
    for (size_t i = 0; i < rank; ++i) {
      if (i == axis) continue;
      columns *= table.sizes[i];
      const size_t of_gradient = i < axis ? i : i - axis - 1 + behind;
      others.push_back({table.sizes[i], gradient.strides[of_gradient], table.strides[i]});
    }
    if (num_ids > kMost || rows > kMost) {
      throw Unsupported(concat(name, ": got ", num_ids, " ids and ", rows, " rows, want at most ",
                               kMost, " of each"));
    }
    std::stable_sort(others.begin(), others.end(),
                     [](const Axis& x, const Axis& y) { return x.b > y.b; });
    of_columns = columns_of(name, others, table.strides[axis]);
    of_rows = axes_of(name, ids.sizes, gradient.strides.data() + axis);
    id_axes = axes_of(name, ids.sizes, ids.strides.data());
    // The number of rows takes the place of an id that is out of bounds.
    const int64_t bits_of_id = std::bit_width(static_cast<uint64_t>(rows) | 1);
    num_digits = static_cast<int32_t>(ceil_div(bits_of_id, kDigitBits));
    bits = static_cast<int32_t>(ceil_div(bits_of_id, num_digits));
    ids_of_block = round_up(std::max<int64_t>(1, ceil_div(num_ids, kMostSortBlocks)), kTile);
    const SortedSumsWorkspace space = ops::sorted_sums_workspace(num_ids, columns, dtype);
    counts_at = space.parts_bytes.constant();
    arrays_at = counts_at + space.counts_bytes.constant();
    array_bytes = space.array_bytes.constant();
    workspace_bytes = space.bytes().constant();
  }

  bool is_double() const { return dtype == DType::kDouble; }
  bool has_table() const { return rows > 0 && columns > 0; }
  int64_t sort_blocks() const { return ceil_div(num_ids, ids_of_block); }
  int64_t num_parts() const { return 2 * std::max<int64_t>(0, ceil_div(num_ids, kPart) - 1); }

  // How many columns can be read and written at once.
  int64_t vector() const {
    const auto last = static_cast<size_t>(of_columns.from.count - 1);
    const bool is_dense = of_columns.from.strides.at(last) == 1 && of_columns.to.at(last) == 1;
    int64_t vector = is_dense ? kVectorBytes / ir::size_bytes(dtype) : 1;
    const auto is_divided = [&] {
      int64_t all = of_columns.from.sizes.at(last) | of_columns.to_row;
      for (int32_t i = 0; i < of_rows.count; ++i) all |= of_rows.strides.at(i);
      for (size_t i = 0; i < last; ++i) all |= of_columns.from.strides.at(i) | of_columns.to.at(i);
      return all % vector == 0;  // which is a power of two
    };
    while (vector > 1 && !is_divided()) vector /= 2;
    return vector;
  }

  std::string name;
  DType dtype, of_ids;
  int64_t num_ids, rows = 0, columns = 1;
  bool counts_from_end;
  int64_t padding;
  Axes id_axes, of_rows;
  Columns of_columns;
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

std::shared_ptr<const Module> built(const SumsText& text, const region::CodegenOptions& options) {
  return build(text.name, text.text, {.dump_dir = options.dump_dir}, options.device);
}

// Sorts the ids of a node.
class Sort {
 public:
  Sort(const Problem& problem, const region::CodegenOptions& options)
      : of_(problem),
        device_(options.device),
        sort_(built(sort_text(problem.of_ids), options), "sorted_sums_sort") {}

  void run(const void* ids, const Sorted& to, void* stream) const {
    const auto num_ids = static_cast<uint32_t>(of_.num_ids);
    const auto rows = static_cast<uint32_t>(of_.rows);
    const uint32_t below_zero = of_.counts_from_end ? rows : 0;
    void* const fault = faults(device_).word();
    const auto kind =
        static_cast<uint32_t>(of_.name == "TakeGrad" ? Fault::kBadPlace : Fault::kBadId);
    const auto launch = [&](int64_t blocks, int64_t of_block, const Digits& digits) {
      start(sort_.get(), blocks, {kThreads}, kSortBytes, stream, ids, of_.id_axes, rows, below_zero,
            fault, kind, num_ids, static_cast<uint32_t>(of_block), digits, to);
    };
    if (of_.num_ids <= kFewIds) {
      launch(1, kFewIds, {0, of_.num_digits, of_.bits, kCount | kPlace});
      return;
    }
    for (int32_t digit = 0; digit < of_.num_digits; ++digit) {
      for (const int32_t what : {kCount, kPlace}) {
        launch(of_.sort_blocks(), of_.ids_of_block, {digit, digit + 1, of_.bits, what});
      }
    }
  }

 private:
  const Problem& of_;
  int device_;
  KernelOfModule sort_;
};

// Adds the rows of sorted ids, with so many columns at a time.
class Sums {
 public:
  Sums(const Problem& problem, int64_t vector, const region::CodegenOptions& options)
      : of_(problem),
        vector_(vector),
        module_(built(sums_text({.dtype = problem.dtype,
                                 .vector = vector,
                                 .rows_are_run = problem.of_rows.count == 1,
                                 .columns_are_run = problem.of_columns.from.count == 1,
                                 .wide_index = problem.columns > kMost - kMargin}),
                      options)),
        parts_(module_, "sorted_sums_parts"),
        table_(module_, "sorted_sums_table") {}

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
    const auto launch = [&](const KernelOfModule& kernel, int64_t blocks, int64_t wanted_blocks,
                            int64_t shared_bytes, auto... given) {
      const int64_t of_strip = ceil_div(lines, std::min(lines, ceil_div(wanted_blocks, blocks)));
      const int64_t strips = ceil_div(lines, of_strip), width = of_strip * line;
      start(kernel.get(), blocks * strips, {32, kWarps}, shared_bytes, stream, gradient,
            of_.of_rows, of_.of_columns, keys, numbers, static_cast<uint32_t>(of_.num_ids),
            static_cast<uint32_t>(of_.rows), padding(), of_.columns, static_cast<uint32_t>(strips),
            width, given...);
    };
    if (const int64_t parts = of_.num_parts(); parts > 0) {
      launch(parts_, parts, kPartBlocks, sum_bytes, space.parts);
    }
    launch(table_, ceil_div(of_.rows, kRows), kTableBlocks, kBoundBytes + sum_bytes,
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
  std::shared_ptr<const Module> module_;
  KernelOfModule parts_, table_;
};

class SortedSumsKernel final : public region::Kernel {
 public:
  SortedSumsKernel(const Problem& problem, const region::CodegenOptions& options)
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
    Driver::get().synchronize(options_.device, stream, problem_.name);
    faults(options_.device).check();
  }

  std::string str() const override {
    return concat(problem_.name, ", ", problem_.num_ids, " ids, table ", problem_.rows, " x ",
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

std::unique_ptr<const region::Kernel> make_sorted_sums(const region::BoundNode& bound) {
  const auto& [node, inputs, outputs, options] = bound;
  ORT_CHECK(inputs.size() == 2 && outputs.size() == 2, node.op.name, ": got ", outputs.size(),
            " results, want a table and a workspace");
  const Layout &table = outputs[0], &space = outputs[1];
  const Problem problem(node, inputs[0], inputs[1], table);
  ORT_CHECK(
      space.dtype == DType::kUInt8 && space.sizes == std::vector<int64_t>{problem.workspace_bytes},
      node.op.name, ": the workspace does not fit, want ", problem.workspace_bytes, " bytes");
  return std::make_unique<SortedSumsKernel>(problem, options);
}

}  // namespace torch_ort::cuda
