#include "cuda/region.h"

#include "base/error.h"
#include "base/rounding.h"
#include "cuda/body.h"
#include "cuda/build.h"
#include "cuda/driver.h"
#include "cuda/faults.h"
#include "cuda/schema.h"
#include "cuda/stream.h"
#include "cuda/text.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ir::DType;
using region::BoundSchedule;
using region::Kernel;

constexpr int64_t kVectorBytes = 16;  // of one memory access
constexpr int64_t kMostVector = 8;

// ---- which operands are read and written as vectors

bool divides(int64_t vector, std::span<const Access::Axis> axes) {
  return std::all_of(axes.begin(), axes.end(), [vector](const Access::Axis& axis) {
    return axis.size == 1 || axis.stride % vector == 0;
  });
}

// Whether columns are contiguous, in one run or in several.
bool has_runs(const Access& access) { return access.columns.back().stride == 1; }

bool lies_in_vectors(const Access& access, bool has_rows, int64_t vector) {
  if (!has_runs(access) || access.begin % vector != 0) return false;
  if (has_rows && !divides(vector, access.rows)) return false;
  if (access.is_one_run()) return true;
  const std::span columns = access.columns;
  return columns.back().size % vector == 0 && divides(vector, columns.first(columns.size() - 1));
}

// By how many elements a row begins further into a vector than the row before it; nothing if rows
// differ in that, or if their columns are no run.
std::optional<int64_t> shift_of_rows(const Access& access, int64_t vector) {
  if (!has_runs(access) || !access.is_one_run() || access.begin % vector != 0) return std::nullopt;
  if (divides(vector, access.rows)) return 0;
  if (access.rows.size() != 1 || access.rows[0].stride < 0) return std::nullopt;
  return access.rows[0].stride % vector;
}

// An upper bound of offsets. The largest of these, and of the numbers of rows and columns, decides
// whether kernels count in 32 or 64 bits.
int64_t extent(const Access& access) {
  int64_t last = access.begin;
  for (const auto* axes : {&access.rows, &access.columns}) {
    for (const Access::Axis& axis : *axes) {
      last += std::max<int64_t>(0, axis.size - 1) * std::abs(axis.stride);
    }
  }
  return last;
}

// The body of a region with its operands, for one set of sizes.
struct Problem {
  Problem(const BoundSchedule& bound, bool round_short_floats)
      : body(make_body(bound, round_short_floats)),
        spaces(bound.schedule.spec.spaces),
        rows(bound.num_rows),
        columns(bound.num_columns),
        groups(bound.num_groups),
        is_double(bound.is_double) {}

  bool has_columns(size_t input) const {
    return spaces[input] == Space::kFull || spaces[input] == Space::kColumn ||
           spaces[input] == Space::kTable;
  }

  // The longest vector that an operand can be read by and that rows can be divided into.
  int64_t vector() const {
    int64_t smallest = kVectorBytes;
    const auto note = [&smallest](const Access& access) {
      if (has_runs(access)) smallest = std::min(smallest, ir::size_bytes(access.dtype));
    };
    for (size_t i = 0; i < body.inputs.size(); ++i) {
      if (has_columns(i)) note(body.inputs[i]);
    }
    for (const Store& store : body.stores) {
      if (store.is_full) note(store.to);
    }
    int64_t vector = std::min(kMostVector, kVectorBytes / smallest);
    while (vector > 1 && columns % vector != 0 && !shift(vector)) vector /= 2;
    return vector;
  }

  // By how many elements each row begins further into a vector than the row before it, where rows
  // are cut by vectors, as rows of logits for 50,257 words are. If operands differ in that, rows of
  // results have to begin with a vector; inputs are then read across vectors. Nothing otherwise, if
  // rows are short, or if the body has values for which all elements of a vector must exist.
  std::optional<int64_t> shift(int64_t vector) const {
    constexpr int64_t kShortRow = 512;
    if (rows != 1 && columns < kShortRow) return std::nullopt;
    std::set<int64_t> of_inputs, of_results;
    const auto fits = [vector](const Access& access, std::set<int64_t>& shifts) {
      const std::optional<int64_t> shift = shift_of_rows(access, vector);
      if (shift) shifts.insert(*shift);
      return shift.has_value();
    };
    for (size_t i = 0; i < body.inputs.size(); ++i) {
      if (!has_columns(i)) continue;
      const bool is_of_elements = spaces[i] == Space::kFull || rows == 1;
      if (!is_of_elements || !fits(body.inputs[i], of_inputs)) return std::nullopt;
    }
    for (const Store& store : body.stores) {
      if (store.is_full && !fits(store.to, of_results)) return std::nullopt;
    }
    std::set<int64_t> all = of_inputs;
    all.insert(of_results.begin(), of_results.end());
    if (all.empty()) return std::nullopt;
    const bool are_equal = all.size() == 1;
    of_results.erase(0);
    if (!are_equal && !of_results.empty()) return std::nullopt;
    const int64_t common = are_equal ? *all.begin() : 0;
    // A thread sums the same columns in all rows.
    if (body.num_column_sums() > 0 && common != 0) return std::nullopt;
    if (rows == 1) return are_equal && common == 0 ? std::optional(common) : std::nullopt;
    // Random numbers are drawn for vectors of elements as they lie in dense rows.
    const bool is_random =
        std::any_of(body.values.begin(), body.values.end(), [](const Value& value) {
          return value.kind == Value::Kind::kRandom && value.space == Space::kFull;
        });
    return is_random ? std::nullopt : std::optional(common);
  }

  Work work(int64_t vector) const {
    const int wide = is_double ? 8 : 4;
    const std::vector<bool> again = body.read_again();
    Work work{.rows = rows, .columns = columns, .groups = groups};
    work.reduces_rows = body.reduces_rows();
    work.vector = static_cast<int>(vector);
    if (rows > 1 && columns % vector != 0) work.shift = static_cast<int>(shift(vector).value_or(0));
    for (size_t i = 0; i < body.values.size(); ++i) {
      if (again[i] || body.values[i].space == Space::kColumn) {
        work.kept_bytes += body.bytes_in_registers(body.values[i], wide);
      }
    }
    for (const RowsSum& sum : body.sums) {
      (sum.is_total ? work.sums_all : work.sums_columns) = true;
      if (!sum.is_total) work.kept_bytes += wide;
    }
    work.bytes_of_number = wide;
    return work;
  }

  bool wants_wide_index() const {
    // Kernels also compute offsets a little beyond the end, before they find that nothing is there.
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 20);
    int64_t most = rows * columns;
    for (const Access& input : body.inputs) most = std::max(most, extent(input));
    for (const Store& store : body.stores) most = std::max(most, extent(store.to));
    return most > kMost;
  }

  Plan plan(int64_t vector) const {
    Plan plan{.body = body, .geometry = choose_geometry(work(vector)), .is_double = is_double};
    plan.wide_index = wants_wide_index();
    // Then all operands can be accessed by vectors.
    const bool is_cut = columns % vector != 0;
    for (size_t i = 0; i < body.inputs.size(); ++i) {
      const bool has_rows = spaces[i] != Space::kColumn;
      plan.input_vectors.push_back(has_columns(i) &&
                                   (is_cut || lies_in_vectors(body.inputs[i], has_rows, vector)));
      const bool is_shifted = is_cut && spaces[i] == Space::kFull && rows > 1;
      const int64_t own = is_shifted ? shift_of_rows(body.inputs[i], vector).value() : 0;
      plan.input_shifts.push_back(own == plan.geometry.shift ? 0 : static_cast<int>(own));
    }
    for (const Store& store : body.stores) {
      plan.store_vectors.push_back(store.is_full &&
                                   (is_cut || lies_in_vectors(store.to, true, vector)));
    }
    return plan;
  }

  Body body;
  std::vector<Space> spaces;
  int64_t rows, columns, groups;
  bool is_double;
};

// ---- arguments

// The values of parameters in eight bytes each. A kernel reads the lowest bytes, as many as the
// type of the parameter has.
class Arguments {
 public:
  explicit Arguments(size_t count) { values_.reserve(count); }

  void add_pointer(const void* pointer) { values_.push_back(reinterpret_cast<uint64_t>(pointer)); }
  void add_integer(int64_t number) { values_.push_back(static_cast<uint64_t>(number)); }
  template <typename T>
  void add_real(T number) {
    uint64_t bits = 0;
    std::memcpy(&bits, &number, sizeof(number));
    values_.push_back(bits);
  }

  void** pointers() {
    pointers_.clear();
    for (uint64_t& value : values_) pointers_.push_back(&value);
    return pointers_.data();
  }

 private:
  std::vector<uint64_t> values_;
  std::vector<void*> pointers_;
};

// A text with its geometry, and the kernels that are built from it.
class Variant {
 public:
  Variant(const Problem& problem, int64_t vector, const region::CodegenOptions& options)
      : plan_(problem.plan(vector)),
        text_(write_kernel(plan_, problem.rows, problem.columns, problem.groups)),
        bytes_of_number_(problem.is_double ? 8 : 4),
        groups_(problem.groups),
        columns_(problem.columns),
        device_(options.device),
        module_(build(text_.name, text_.text, {.dump_dir = options.dump_dir}, device_)),
        finish_(module_, text_.finish_name()) {
    for (int stage = 0; stage < text_.stages; ++stage) {
      stages_.emplace_back(module_, text_.stage_name(stage));
    }
    // Equal texts are stored once, with their modules.
    text_.text = {};
  }

  const std::string& name() const { return text_.name; }
  const std::string& listing() const { return text_.listing; }

  // Whether all addresses are aligned to vectors.
  bool takes(const void* const* inputs, void* const* outputs) const {
    const int64_t vector = plan_.geometry.vector;
    const auto is_aligned = [vector](const void* address, DType dtype) {
      const int64_t bytes = std::min(kVectorBytes, vector * ir::size_bytes(dtype));
      return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
    };
    for (size_t i = 0; i < plan_.input_vectors.size(); ++i) {
      if (plan_.input_vectors[i] && !is_aligned(inputs[i], plan_.body.inputs[i].dtype)) {
        return false;
      }
    }
    for (size_t i = 0; i < plan_.store_vectors.size(); ++i) {
      const Access& to = plan_.body.stores[i].to;
      if (plan_.store_vectors[i] && !is_aligned(outputs[to.result], to.dtype)) return false;
    }
    return true;
  }

  void run(const void* const* inputs, void* const* outputs) const {
    const Geometry& shape = plan_.geometry;
    const int64_t lines = shape.blocks_per_group * groups_;
    const int64_t column_bytes = lines * text_.partial_columns * bytes_of_number_;
    const int64_t total_bytes = lines * shape.strips * text_.partial_totals * bytes_of_number_;
    const int64_t part_bytes = lines * shape.strips * text_.reductions * bytes_of_number_;
    const Scratch column_sums(column_bytes, device_), totals(total_bytes, device_);
    const Scratch parts(part_bytes, device_);
    const Call call{inputs, outputs, column_sums.data(), totals.data(), parts.data()};
    void* const stream = current_stream(device_);
    if (lines > 0 && (columns_ > 0 || !works_on_elements())) {
      const Dim3 grid = plan_.has_strips() ? grid_of_strips(lines) : grid_of(lines);
      for (const KernelOfModule& stage : stages_) {
        start(stage, text_.parameters, call, stream, grid,
              {static_cast<uint32_t>(shape.threads_x), static_cast<uint32_t>(shape.threads_y)},
              text_.shared_numbers);
      }
    }
    if (text_.finish_parameters.empty()) return;
    if (groups_ > 0) {
      const int64_t parts = text_.partial_columns > 0 ? (columns_ + 31) / 32 : 1;
      Dim3 grid = grid_of(parts * groups_);
      grid.y = static_cast<uint32_t>(plan_.body.sums.size());
      start(finish_, text_.finish_parameters, call, stream, grid, {32, 8}, 256);
    }
  }

 private:
  struct Call {
    const void* const* inputs;
    void* const* outputs;
    void *column_sums, *totals, *parts;
  };

  Dim3 grid_of(int64_t blocks) const {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (blocks > kMost) {
      throw Unsupported(concat("CUDA: blocks of kernel '", text_.name, "': got ", blocks,
                               ", want at most ", kMost));
    }
    return {static_cast<uint32_t>(blocks)};
  }
  // Strips along x, so that blocks of the same rows follow each other; lines of them along y and z.
  Dim3 grid_of_strips(int64_t lines) const {
    constexpr int64_t kMostAlongY = 65535;
    Dim3 grid = grid_of(plan_.geometry.strips);
    grid.y = static_cast<uint32_t>(std::min(grid_of(lines).x, uint32_t{kMostAlongY}));
    grid.z = static_cast<uint32_t>(ceil_div(lines, int64_t{grid.y}));
    return grid;
  }

  void start(const KernelOfModule& kernel, const std::vector<Parameter>& parameters,
             const Call& call, void* stream, Dim3 grid, Dim3 threads,
             uint32_t shared_numbers) const {
    Arguments arguments(parameters.size());
    for (const Parameter& each : parameters) add(arguments, each, call);
    const Launch launch{.grid = grid,
                        .block = threads,
                        .shared_bytes = shared_numbers * bytes_of_number_,
                        .stream = stream};
    Driver::get().launch(kernel.get(), launch, arguments.pointers());
  }

  void add(Arguments& arguments, const Parameter& each, const Call& call) const {
    switch (each.kind) {
      case Parameter::Kind::kInput: return arguments.add_pointer(call.inputs[each.index]);
      case Parameter::Kind::kOutput: {
        const auto* base = static_cast<const char*>(call.outputs[each.index]);
        const int64_t begin = each.number * ir::size_bytes(output_dtype(each.index));
        return arguments.add_pointer(base == nullptr ? base : base + begin);
      }
      case Parameter::Kind::kColumnSums: return arguments.add_pointer(call.column_sums);
      case Parameter::Kind::kTotals: return arguments.add_pointer(call.totals);
      case Parameter::Kind::kParts: return arguments.add_pointer(call.parts);
      case Parameter::Kind::kFault: return arguments.add_pointer(faults(device_).word());
      case Parameter::Kind::kInteger: return arguments.add_integer(each.number);
      case Parameter::Kind::kWide:
        if (bytes_of_number_ == 8) return arguments.add_real(each.real);
        return arguments.add_real(static_cast<float>(each.real));
    }
  }

  // Whether no result has one number for each row; such results exist even if there are no columns.
  bool works_on_elements() const {
    return plan_.body.sums.empty() &&
           std::all_of(plan_.body.stores.begin(), plan_.body.stores.end(),
                       [](const Store& store) { return store.is_full; });
  }

  DType output_dtype(int result) const {
    for (const Store& store : plan_.body.stores) {
      if (store.to.result == result) return store.to.dtype;
    }
    for (const RowsSum& sum : plan_.body.sums) {
      if (sum.to.result == result) return sum.to.dtype;
    }
    throw InternalError(concat("CUDA: result ", result, " is not written by the kernel"));
  }

  Plan plan_;
  KernelText text_;
  uint32_t bytes_of_number_;
  int64_t groups_, columns_;
  int device_;
  std::shared_ptr<const Module> module_;
  std::deque<KernelOfModule> stages_;
  KernelOfModule finish_;
};

class RegionKernel final : public Kernel {
 public:
  RegionKernel(const BoundSchedule& bound, const region::CodegenOptions& options)
      : problem_(bound, options.round_short_floats),
        options_(options),
        usual_(problem_, problem_.vector(), options) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    faults(options_.device).check();
    const Variant& found = variant(inputs, outputs);
    found.run(inputs, outputs);
    if (!options_.synchronize) return;
    Driver::get().synchronize(options_.device, current_stream(options_.device), found.name());
    faults(options_.device).check();
  }
  std::string str() const override { return usual_.listing(); }

 private:
  // An operand may begin at any address. If one is not aligned, a second text reads each element by
  // itself.
  const Variant& variant(const void* const* inputs, void* const* outputs) const {
    if (usual_.takes(inputs, outputs)) return usual_;
    return *narrow_.get([this] { return std::make_unique<Variant>(problem_, 1, options_); });
  }

  Problem problem_;
  region::CodegenOptions options_;
  Variant usual_;
  mutable Once<std::unique_ptr<Variant>> narrow_;
};

}  // namespace

bool can_load(DType dtype) {
  static constexpr std::array kDTypes = {
      DType::kFloat, DType::kDouble, DType::kBFloat16, DType::kHalf,  DType::kBool,
      DType::kUInt8, DType::kInt8,   DType::kInt16,    DType::kInt32, DType::kInt64};
  return std::find(kDTypes.begin(), kDTypes.end(), dtype) != kDTypes.end();
}

std::unique_ptr<const Kernel> make_region(const region::Schedule& schedule,
                                          const ir::SymbolLookup& lookup,
                                          const std::vector<region::Layout>& inputs,
                                          const std::vector<region::Layout>& outputs,
                                          const region::CodegenOptions& options) {
  if (schedule.spec.has_row_list) {
    throw Unsupported("Region: lists of rows have no kernel on CUDA");
  }
  const BoundSchedule bound(schedule, lookup, inputs, outputs, can_load);
  return std::make_unique<RegionKernel>(bound, options);
}

}  // namespace torch_ort::cuda
