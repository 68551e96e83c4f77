#include "cuda/text.h"

#include "base/error.h"
#include "base/rounding.h"
#include "ops/words.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ir::DType;
using Kind = Value::Kind;
using Reduction = Value::Reduction;

std::string number(double x) {
  if (std::isnan(x)) return "not_a_number()";
  if (std::isinf(x)) return x < 0 ? "-infinity()" : "infinity()";
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.17g", x);
  return concat("wide(", digits, ")");
}

uint64_t hash(const std::string& text) {  // FNV-1a
  uint64_t state = 0xCBF29CE484222325u;
  for (const char each : text) state = (state ^ static_cast<unsigned char>(each)) * 0x100000001B3u;
  return state;
}

std::string hex(uint64_t x) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(x));
  return digits;
}

// The lines of a text, indented by their braces. Each may have a note for readers.
class Lines {
 public:
  template <typename... Parts>
  void operator()(const Parts&... parts) {
    add(concat(parts...), "");
  }
  void noted(const std::string& line, const std::string& note) { add(line, note); }

  std::string str(bool with_notes) const {
    std::string all;
    for (const auto& [line, note] : lines_) {
      all += line;
      if (with_notes && !note.empty()) all += "  // " + note;
      all += '\n';
    }
    return all;
  }

 private:
  void add(std::string line, const std::string& note) {
    if (line.starts_with('}')) --depth_;
    const bool is_directive = line.starts_with('#');
    const bool opens = line.ends_with('{');
    lines_.emplace_back(is_directive ? line : std::string(2 * depth_, ' ') + line, note);
    if (opens) ++depth_;
  }

  std::vector<std::pair<std::string, std::string>> lines_;
  size_t depth_ = 0;
};

class Writer {
 public:
  Writer(const Plan& plan, int64_t rows, int64_t columns, int64_t groups)
      : plan_(plan),
        body_(plan.body),
        shape_(plan.geometry),
        rows_(rows),
        columns_(columns),
        groups_(groups),
        is_kept_(shape_.loops ? std::vector<bool>(body_.values.size(), false)
                              : body_.read_again()) {
    for (size_t i = 0; i < is_kept_.size(); ++i) {
      // Values of columns stay in registers in any case.
      if (body_.values[i].space != Space::kFull) is_kept_[i] = false;
    }
  }

  KernelText run() {
    find_uses();
    add_parameters();
    out_ = &kernel_;
    if (shape_.is_split) {
      result_.stages = last_stage() + 1;
      for (int stage = 0; stage < result_.stages; ++stage) write_stage(stage);
    } else {
      write_kernel();
    }
    if (!body_.sums.empty()) write_finish();
    return assemble();
  }

 private:
  // ---- names

  const Value& at(int value) const { return body_.values[value]; }
  bool is_hoisted(int value) const { return at(value).space == Space::kColumn && !shape_.loops; }

  // Whether the value is a pack with the thread's whole vector, as it was read.
  bool is_pack(int value) const { return Body::is_read(at(value)); }
  // Whether the value is a pack, or an array of as many numbers, rather than one number.
  bool is_array(int value) const { return is_pack(value) || at(value).kind == Kind::kRandom; }

  // By value: whether a pass reads all vectors of a thread before it computes with the first, so
  // that many memory accesses are under way. What is not kept takes registers only for that, so
  // there is a limit to it.
  std::vector<bool> read_first(const std::vector<int>& needed) const {
    std::vector<bool> first(body_.values.size(), false);
    if (shape_.vectors == 1) return first;
    int64_t registers = 0;
    for (int value : needed) {
      if (is_pack(value) && !is_hoisted(value)) registers += registers_of(value, shape_.vectors);
    }
    for (int value : needed) {
      const int64_t most = shape_.loops ? 2 * kMostRegistersOfReads : kMostRegistersOfReads;
      first[value] = is_pack(value) && !is_hoisted(value) && (is_kept_[value] || registers <= most);
    }
    return first;
  }

  std::string name(int value) const {
    static constexpr const char* kPrefixes[] = {"s", "c", "r", "v"};
    return concat(kPrefixes[static_cast<size_t>(at(value).space)], value);
  }

  // Whether the value is there for all vectors of a thread.
  bool has_vectors(int value) const {
    return is_kept_[value] || is_hoisted(value) || read_first_[value];
  }
  // The array that has the value for all columns of a thread's vector.
  std::string array(int value) const {
    return has_vectors(value) ? name(value) + "[e]" : name(value);
  }

  // The value for the current column, if it has columns.
  std::string ref(int value) const {
    const Value& each = at(value);
    if (each.kind == Kind::kConstant) return number(each.number);
    if (each.kind == Kind::kRatio) return concat("ratio", value);
    if (each.kind == Kind::kColumns) return "wide(columns)";
    if (each.space == Space::kScalar || each.space == Space::kRow) return name(value);
    if (has_vectors(value) || is_array(value)) return array(value) + "[i]";
    return name(value);
  }

  std::string call(int value) const {
    const Value& each = at(value);
    std::string text = ops::word(each.op).name;
    for (size_t i = 0; i < each.operands.size(); ++i) {
      text += (i == 0 ? "(" : ", ") + ref(each.operands[i]);
    }
    return text + ")";
  }

  static int label_of(const Value& value) {
    return value.kind == Kind::kScatter ? value.operands[0] : value.operands[1];
  }
  std::string label_name(int value) const {
    const bool is_sum = at(value).kind == Kind::kReduced && at(value).operands.size() == 1;
    const Value& each = is_sum ? at(at(value).operands[0]) : at(value);
    const int label = label_of(each);
    return each.has_ignored ? concat("label", label, "_but_", each.ignored < 0 ? "minus_" : "",
                                     std::abs(each.ignored))
                            : concat("label", label);
  }

  static const char* operation(Reduction reduction) {
    if (reduction == Reduction::kMax) return "Largest";
    return reduction == Reduction::kMin ? "Smallest" : "Sum";
  }

  // ---- parameters

  void find_uses() {
    for (const Value& value : body_.values) {
      for (int operand : value.operands) used_.insert(operand);
      if (value.input >= 0) read_inputs_.insert(value.input);
      if (value.ids >= 0) read_inputs_.insert(value.ids);
    }
    for (const Store& store : body_.stores) used_.insert(store.value);
    for (const RowsSum& sum : body_.sums) used_.insert(sum.value);
  }

  void integer(const std::string& name, int64_t number, const char* type = "index_t") {
    parameters_->push_back(
        {.kind = Parameter::Kind::kInteger, .type = type, .name = name, .number = number});
  }

  void pointer(Parameter::Kind kind, const std::string& type, const std::string& name,
               int index = -1, int64_t begin = 0) {
    parameters_->push_back(
        {.kind = kind, .type = type, .name = name, .index = index, .number = begin});
  }

  // A number that others are divided by.
  void divisor(const std::string& name, int64_t number) {
    integer(name, number);
    integer(name + "_by", static_cast<int64_t>(factor_and_shift(number)), "u64");
  }

  // The parameters for sizes and strides of an operand; `name` says whether those of rows or
  // columns.
  void axes(const std::vector<Access::Axis>& axes, const std::string& name) {
    if (axes.size() == 1) return integer(name, axes[0].stride);
    for (size_t i = 0; i < axes.size(); ++i) {
      if (i > 0) divisor(concat(name, "_size", i), axes[i].size);
      integer(concat(name, i), axes[i].stride);
    }
  }

  static bool is_plain(const std::vector<Access::Axis>& axes) {
    return axes.size() == 1 && axes[0].stride == 1;
  }

  // The offset of element `at` along axes whose parameters begin with `name`.
  static std::string offset(const std::vector<Access::Axis>& axes, const std::string& name,
                            const std::string& at) {
    if (axes.size() == 1) return concat(at, " * ", name);
    std::string sum, rest = at;
    for (size_t i = axes.size(); i-- > 0;) {
      const std::string by = concat(rest, ", ", name, "_size", i, ", ", name, "_size", i, "_by");
      const std::string place = i > 0 ? concat("remainder(", by, ")") : rest;
      sum = concat(place, " * ", name, i, sum.empty() ? "" : " + ", sum);
      rest = concat("quotient(", by, ")");
    }
    return sum;
  }
  static std::string column_offset(const Access& access, const std::string& name,
                                   const std::string& at) {
    return is_plain(access.columns) ? at : offset(access.columns, name + "_column", at);
  }

  // The offset of the vector whose first column is `column`.
  static std::string vector_offset(const Access& access, const std::string& name) {
    const std::string place = column_offset(access, name, "column");
    return access.columns.size() == 1 ? place : concat("(", place, ")");
  }

  void add_access(const Access& access, const std::string& name, bool has_rows, bool has_columns) {
    if (has_rows) axes(access.rows, name + "_row");
    if (has_columns && !is_plain(access.columns)) axes(access.columns, name + "_column");
  }

  void add_parameters() {
    parameters_ = &result_.parameters;
    for (int input : read_inputs_) {
      pointer(Parameter::Kind::kInput, concat("const ", element(body_.inputs[input].dtype), "*"),
              concat("in", input), input);
    }
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Access& to = body_.stores[i].to;
      pointer(Parameter::Kind::kOutput, concat(element(to.dtype), "*"), concat("out", i), to.result,
              to.begin);
    }
    for (const RowsSum& sum : body_.sums) {
      if (sum.is_total) {
        ++result_.partial_totals;
      } else {
        result_.partial_columns += columns_of_sums();
      }
    }
    if (result_.partial_columns > 0 || has_column_sums()) {
      pointer(Parameter::Kind::kColumnSums, "wide*", "column_sums");
    }
    if (result_.partial_totals > 0) pointer(Parameter::Kind::kTotals, "wide*", "totals");
    if (shape_.is_split) {
      result_.reductions = std::count_if(body_.values.begin(), body_.values.end(), is_reduced);
      pointer(Parameter::Kind::kParts, "wide*", "parts");
    }
    if (has_labels()) pointer(Parameter::Kind::kFault, "u32*", "fault");
    integer("columns", columns_);
    if (has_column_sums()) integer("columns_of_sums", columns_of_sums());
    integer("rows_of_group", groups_ == 0 ? 0 : rows_ / groups_);
    integer("rows_per_block", shape_.rows_per_block);
    if (groups_ > 1) divisor("blocks_per_group", shape_.blocks_per_group);
    if (plan_.has_strips()) {
      integer("blocks", shape_.blocks_per_group * groups_);
      integer("strips", shape_.strips);
    }
    if (shape_.is_split) integer("columns_per_strip", shape_.columns_per_strip);
    for (const Value& value : body_.values) {
      if (value.kind == Kind::kGather) add_table(value);
    }
    for (int input : read_inputs_) {
      const Space space = space_of(input);
      add_access(body_.inputs[input], concat("in", input),
                 space == Space::kFull || space == Space::kRow || space == Space::kIds ||
                     space == Space::kTable,
                 space == Space::kFull || space == Space::kColumn || space == Space::kTable);
    }
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      add_access(body_.stores[i].to, concat("out", i), true, body_.stores[i].is_full);
    }
    for (size_t i = 0; i < body_.values.size(); ++i) {
      if (body_.values[i].kind == Kind::kRandom) {
        integer(concat("stream", i), body_.values[i].stream, "u64");
      }
      if (body_.values[i].kind != Kind::kRatio) continue;
      parameters_->push_back({.kind = Parameter::Kind::kWide,
                              .type = "wide",
                              .name = concat("ratio", i),
                              .real = body_.values[i].number});
    }
  }

  void add_table(const Value& value) {
    if (!tables_.insert(value.input).second) return;
    integer(concat("in", value.input, "_rows"), body_.inputs[value.input].rows[0].size);
  }

  // The space in which the body reads an input.
  Space space_of(int input) const {
    for (const Value& value : body_.values) {
      if (value.kind == Kind::kGather && value.input == input) return Space::kTable;
      if (value.kind == Kind::kGather && value.ids == input) return Space::kIds;
      if (value.kind == Kind::kInput && value.input == input) return value.space;
    }
    return Space::kScalar;
  }

  // Whether the value compares columns with a label.
  static bool reads_label(const Value& value) {
    return value.kind == Kind::kScatter ||
           (value.kind == Kind::kReduced && value.reduction == Reduction::kPick);
  }
  bool has_labels() const {
    return std::any_of(body_.values.begin(), body_.values.end(), [](const Value& value) {
      return value.kind == Kind::kGather || reads_label(value);
    });
  }
  // Whether columns are compared with labels, in a text whose threads have several of them.
  bool compares_labels() const {
    return !shape_.loops && shape_.vectors > 1 &&
           std::any_of(body_.values.begin(), body_.values.end(), reads_label);
  }
  bool has_column_sums() const { return body_.num_column_sums() > 0; }

  static std::string signature(const std::vector<Parameter>& parameters) {
    std::string list;
    for (const Parameter& each : parameters) {
      list += concat(list.empty() ? "" : ", ", each.type, " ", each.name);
    }
    return list;
  }

  // ---- the kernel

  void write_kernel() {
    open_kernel("@NAME@");
    if (!shape_.loops) write_columns();
    write_starts_of_sums(kAllStages);
    open_rows();
    for (size_t i = 0; i < is_kept_.size(); ++i) {
      if (is_kept_[i]) declare(static_cast<int>(i));
    }
    for (int pass = 0; pass <= body_.last_pass + 1; ++pass) {
      write_row_values(pass);
      if (pass > body_.last_pass || largest_of_joined(pass - 1) >= 0) continue;
      if (const int largest = largest_of_joined(pass); largest >= 0) {
        write_joined_pass(pass, largest);
        continue;
      }
      write_pass(pass);
      for (int value : body_.reductions_of(pass)) finish_reduction(value);
    }
    write_row_results();
    out()("}");
    write_ends_of_sums(kAllStages);
    out()("}");
  }

  // A pass as a kernel of its own, or the last one, which follows them if numbers of rows are left
  // to be written. Each combines again what earlier ones have found for the strips of a row.
  void write_stage(int stage) {
    labels_.clear();
    open_kernel(result_.stage_name(stage, "@NAME@"));
    write_starts_of_sums(stage);
    open_rows();
    for (int pass = 0; pass <= stage; ++pass) {
      write_row_values(pass);
      if (pass == stage) break;
      for (int value : body_.reductions_of(pass)) combine_parts(value);
    }
    if (stage <= body_.last_pass) write_pass(stage);
    for (int value : body_.reductions_of(stage)) write_part(value);
    if (stage == last_stage()) write_row_results();
    out()("}");
    write_ends_of_sums(stage);
    out()("}");
  }

  static constexpr int kAllStages = -1;
  int last_stage() const {
    return body_.reductions_of(body_.last_pass).empty() ? body_.last_pass : body_.last_pass + 1;
  }
  // Whether a stage computes the sum.
  bool is_in(int stage, const RowsSum& sum) const {
    return stage == kAllStages || stage == (sum.is_of_rows ? last_stage() : body_.last_pass);
  }

  void open_kernel(const std::string& kernel_name) {
    const int threads = shape_.threads_x * shape_.threads_y;
    out()("extern \"C\" __global__ void __launch_bounds__(", threads, blocks_at_once(), ")");
    out()(kernel_name, "(", signature(result_.parameters), ") {");
    write_shared();
    if (plan_.has_strips()) {
      out()("const i64 block = blockIdx.z * gridDim.y + blockIdx.y;");
      out()("if (block >= blocks) return;");
      out()("const index_t strip = index_t(blockIdx.x);");
      out()("const index_t first_column = strip * ",
            shape_.is_split ? "columns_per_strip" : std::to_string(shape_.width()), ";");
    } else {
      out()("const i64 block = blockIdx.x;");
      out()("const index_t first_column = 0;");
    }
    if (shape_.loops) write_last_column();
    std::string end = "rows_of_group";
    if (groups_ > 1) {
      const std::string by = "(index_t(block), blocks_per_group, blocks_per_group_by)";
      out()("const index_t group = quotient", by, ";");
      out()("const index_t first_row = group * rows_of_group + remainder", by,
            " * rows_per_block;");
      end = "(group + 1) * rows_of_group";
    } else {
      out()("const index_t first_row = index_t(block) * rows_per_block;");
    }
    out()("const index_t last_row = min(first_row + rows_per_block, ", end, ");");
    write_scalars();
  }

  void write_last_column() {
    // The last vector of a row that is shifted may begin behind the other rows' last one.
    const std::string end = shape_.shift > 0 ? concat("columns + ", shape_.vector) : "columns";
    if (!shape_.is_split) return out()("const index_t last_column = ", end, ";");
    out()("const index_t last_column = first_column + min(columns_per_strip, ", end,
          " - first_column);");
  }

  void open_rows() {
    out()("for (index_t line = first_row; line < last_row; line += ", shape_.threads_y, ") {");
    out()("const index_t row = line + threadIdx.y;");
    out()("const bool is_row = row < last_row;");
    if (shape_.shift > 0) out()("const index_t shift = ", shift_of_row(shape_.shift), ";");
    if (compares_labels()) {
      out()("const index_t of_thread = anew(index_t(threadIdx.x) * ", shape_.vector, ");");
    }
    write_places();
  }

  static constexpr int kBytesOfRegister = 4;
  static constexpr int64_t kMostRegistersOfReads = 32;

  // The registers that so many vectors of a value take.
  int64_t registers_of(int value, int vectors) const {
    const int64_t bytes = body_.bytes_in_registers(at(value), kBytesOfRegister);
    // What is read across vectors is put together from two.
    const int64_t times = is_pack(value) && plan_.input_shifts[at(value).input] != 0 ? 3 : 1;
    return ceil_div(bytes * times * vectors * shape_.vector, kBytesOfRegister);
  }

  // The least number of blocks that a multiprocessor should run at once. Without this hint ptxas
  // may give too few registers to kernels that keep or read many numbers, loop over columns or
  // compute in double.
  const char* blocks_at_once() const {
    if (plan_.is_double) return ", 1";
    const int64_t read = registers_of_reads();
    if (shape_.loops) return read <= 16 ? ", 2" : ", 1";
    const int64_t kept = registers_kept();
    const bool is_small = shape_.threads_x * shape_.threads_y <= 256;
    // Parts of vectors need registers too.
    if (shape_.shift > 0 && kept > 16 && !is_small) return ", 1";
    if (kept <= 32) return is_small && kept + read >= 16 && kept + read <= 24 ? ", 4" : "";
    return kept <= 64 && is_small ? ", 2" : ", 1";
  }

  // What a thread keeps between passes, for all its rows and as sums.
  int64_t registers_kept() const {
    int64_t registers = body_.num_column_sums() * shape_.vectors * shape_.vector;
    for (size_t i = 0; i < body_.values.size(); ++i) {
      if (is_kept_[i] || body_.values[i].space == Space::kColumn) {
        registers += registers_of(static_cast<int>(i), shape_.vectors);
      }
    }
    return registers;
  }
  // What it reads besides before it computes, in the pass that reads most.
  int64_t registers_of_reads() const {
    int64_t most = 0;
    std::vector<bool> made(body_.values.size(), false);
    for (int pass = 0; pass <= body_.last_pass; ++pass) {
      const std::vector<int> needed = body_.needed_in(pass, made);
      const std::vector<bool> first = read_first(needed);
      int64_t registers = 0;
      for (int value : needed) {
        made[value] = is_kept_[value];
        if (!is_pack(value) || is_hoisted(value) || is_kept_[value]) continue;
        registers += registers_of(value, first[value] ? shape_.vectors : 1);
      }
      most = std::max(most, registers);
    }
    return most;
  }

  void write_shared() {
    const int lines = shape_.threads_y, warps = std::max(1, shape_.threads_x / 32);
    const bool reduces = body_.reduces_rows() && shape_.threads_x > 32;
    if (reduces || !body_.sums.empty())
      result_.shared_numbers = static_cast<uint32_t>(lines * warps);
    if (has_column_sums() && !shape_.loops && lines > 1) {
      result_.shared_numbers = static_cast<uint32_t>(lines * shape_.threads_x * shape_.vector);
    }
    if (result_.shared_numbers > 0) {
      out()("SHARED(memory);");
      out()("wide* const shared = reinterpret_cast<wide*>(memory);");
    } else if (body_.reduces_rows()) {
      out()("wide* const shared = nullptr;");
    }
  }

  void write_scalars() {
    for (size_t i = 0; i < body_.values.size(); ++i) {
      const Value& value = body_.values[i];
      const int at = static_cast<int>(i);
      if (value.kind == Kind::kRandom) {
        noted(at, "const u64 seed", i, " = static_cast<u64>(*in", value.input, ");");
      }
      if (value.space != Space::kScalar || !used_.contains(at)) continue;
      if (value.kind == Kind::kInput) {
        noted(at, "const wide s", i, " = widen(*in", value.input, ");");
      } else if (value.kind == Kind::kPointwise) {
        noted(at, "const wide s", i, " = ", call(at), ";");
      }
    }
  }

  // Writes values of columns, which are the same for all rows of the block.
  void write_columns() {
    std::vector<int> columns;
    for (size_t i = 0; i < body_.values.size(); ++i) {
      const int at = static_cast<int>(i);
      if (body_.values[i].space == Space::kColumn && used_.contains(at)) columns.push_back(at);
    }
    if (columns.empty()) return;
    for (int value : columns) declare(value);
    open_vectors("column >= columns");
    for (int value : columns) write_load(value);
    const auto is_made = [this](int value) { return at(value).kind == Kind::kPointwise; };
    if (std::any_of(columns.begin(), columns.end(), is_made)) {
      open_lanes();
      for (int value : columns) {
        if (is_made(value)) noted(value, ref(value), " = ", call(value), ";");
      }
      out()("}");
    }
    out()("}");
  }

  // The value for a vector of the thread, or for all of them.
  void declare(int value) {
    const std::string vectors = has_vectors(value) ? concat("[", shape_.vectors, "]") : "";
    if (is_pack(value)) {
      const DType dtype = body_.inputs[at(value).input].dtype;
      out()("Pack<", element(dtype), ", ", shape_.vector, "> ", name(value), vectors, ";");
    } else {
      out()("wide ", name(value), vectors, "[", shape_.vector, "];");
    }
  }

  void open_vectors(const char* unless) {
    const std::string begin = shape_.loops ? "begin" : "first_column";
    const std::string of_thread =
        concat("index_t(e * ", shape_.threads_x, " + threadIdx.x) * ", shape_.vector);
    open_vectors(concat(begin, " + ", of_thread), unless);
  }
  void open_vectors(const std::string& column, const char* unless) {
    out()("#pragma unroll");
    out()("for (int e = 0; e < ", shape_.vectors, "; ++e) {");
    out()("const index_t column = ", column, minus_shift(), ";");
    out()("if (", unless, ") continue;");
  }
  void open_vectors_of_row() {
    const char* const unless = "!is_row || column >= columns";
    if (!compares_labels()) return open_vectors(unless);
    open_vectors(concat("of_thread + e * ", shape_.threads_x * shape_.vector), unless);
  }

  void open_lanes() {
    out()("#pragma unroll");
    out()("for (int i = 0; i < ", shape_.vector, "; ++i) {");
  }

  void write_starts_of_sums(int stage) {
    int64_t offset = 0;
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const RowsSum& sum = body_.sums[i];
      if (!is_in(stage, sum)) continue;
      if (sum.is_total) {
        out()("wide sum", i, " = wide(0);");
      } else if (!shape_.loops) {
        out()("wide sum", i, "[", shape_.vectors, "][", shape_.vector, "] = {};");
      } else {
        // Registers cannot hold the sums of such rows, so each thread adds to its own columns in
        // memory.
        out()("wide* const sum", i, " = ", line_of_sums(offset), ";");
        open_loop();
        open_vectors("column >= columns");
        open_lanes();
        out()("sum", i, "[column + i] = wide(0);");
        out()("}");
        out()("}");
        out()("}");
      }
      if (!sum.is_total) ++offset;
    }
  }

  // A line of partial sums has the columns of each sum after those of the previous one. Each begins
  // with a vector.
  std::string line_of_sums(int64_t sum) const {
    const int64_t count = body_.num_column_sums();
    return concat("column_sums + (block * ", count, " + ", sum, ") * columns_of_sums");
  }
  int64_t columns_of_sums() const { return round_up(columns_, int64_t{shape_.vector}); }

  void open_loop() {
    out()("for (index_t begin = first_column; begin < last_column; begin += ", shape_.width(),
          ") {");
  }

  // The only step of the loop that has the column of the label, or any one if no column has it.
  void open_step_of(const std::string& label) {
    const std::string place =
        concat("max(", label, shape_.shift > 0 ? " + shift" : "", ", index_t(0))");
    out()("if (const index_t begin = ", place, " / ", shape_.width(), " * ", shape_.width(),
          "; is_row) {");
  }

  // By how many elements the row begins into a vector. It is the product of small numbers, so that
  // no number of rows is too large.
  std::string shift_of_row(int shift) const {
    return concat("row % ", shape_.vector, " * ", shift, " % ", shape_.vector);
  }

  // Writes the offset at which the row begins in each full operand.
  void write_places() {
    for (int input : read_inputs_) {
      const Access& access = body_.inputs[input];
      if (space_of(input) != Space::kFull) continue;
      out()("const ", element(access.dtype), "* const at", input, " = in", input, " + (",
            offset(access.rows, concat("in", input, "_row"), "row"), ");");
      if (const int shift = plan_.input_shifts[input]; shift != 0) {
        out()("const int before", input, " = ", shift_of_row(shift), ";");
      }
    }
    for (size_t i = 0; i < body_.values.size(); ++i) {
      const Value& value = body_.values[i];
      if (value.kind != Kind::kGather) continue;
      const Access& ids = body_.inputs[value.ids];
      noted(static_cast<int>(i), "const index_t id", i, " = is_row ? row_of(in", value.ids, "[",
            offset(ids.rows, concat("in", value.ids, "_row"), "row"), "], in", value.input,
            "_rows, fault) : index_t(kBad);");
    }
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Store& store = body_.stores[i];
      if (!store.is_full) continue;
      out()(element(store.to.dtype), "* const to", i, " = out", i, " + (",
            offset(store.to.rows, concat("out", i, "_row"), "row"), ");");
    }
  }

  // Writes the numbers of the row that are known before a pass begins.
  void write_row_values(int pass) {
    for (size_t i = 0; i < body_.values.size(); ++i) {
      const Value& value = body_.values[i];
      const int at = static_cast<int>(i);
      if (value.known_in != pass || value.space != Space::kRow || !used_.contains(at)) continue;
      if (value.kind == Kind::kInput) {
        const std::string place =
            offset(body_.inputs[value.input].rows, concat("in", value.input, "_row"), "row");
        noted(at, "const wide r", i, " = is_row ? widen(in", value.input, "[", place,
              "]) : wide(0);");
      } else if (value.kind == Kind::kPointwise) {
        noted(at, "const wide r", i, " = ", call(at), ";");
      } else if (value.kind == Kind::kRandom) {
        noted(at, "const wide r", i, " = draw(seed", i, ", stream", i, ", u64(row), ", limit(value),
              "u);");
      }
    }
    write_labels(pass);
  }

  void write_labels(int pass) {
    for (size_t i = 0; i < body_.values.size(); ++i) {
      const Value& value = body_.values[i];
      if (!reads_label(value)) continue;
      const int label = label_of(value);
      const std::string name = label_name(static_cast<int>(i));
      if (at(label).known_in != pass || !labels_.insert(name).second) continue;
      const std::string ignored =
          value.has_ignored ? ", " + number(static_cast<double>(value.ignored)) : "";
      noted(static_cast<int>(i), "const index_t ", name, " = is_row ? column_of(", ref(label),
            ", columns, fault", ignored, ") : index_t(kIgnored);");
    }
  }

  static uint32_t limit(const Value& value) {
    const double limit = value.keep * 4294967296.0;
    return limit >= 4294967296.0 ? 0xFFFFFFFFu : static_cast<uint32_t>(limit);
  }

  void write_pass(int pass) {
    const std::vector<int> reduced = body_.reductions_of(pass);
    const std::vector<int> needed = body_.needed_in(pass, made_);
    const bool is_last = pass == body_.last_pass;
    const bool writes = is_last && (has_full_stores() || has_full_sums());
    if (reduced.empty() && !writes) return;
    for (int value : reduced) write_start(value);
    read_first_ = read_first(needed);
    if (is_at_one_label(reduced) && !writes) {
      open_step_of(label_name(reduced[0]));
    } else if (shape_.loops) {
      open_loop();
    }
    open_vectors_of_pass(needed);
    if (is_last) declare_stored();
    open_lanes();
    for (int value : needed) write_lane(value);
    if (is_last) write_last_lanes();
    if (!reduced.empty() || (is_last && has_full_totals())) write_guard_of_lanes();
    for (int value : reduced) write_reduction(value);
    if (is_last) write_totals();
    out()("}");
    if (is_last) write_stores();
    out()("}");
    if (shape_.loops) out()("}");
    for (int value : needed) {
      if (is_kept_[value]) made_[value] = true;
    }
  }

  // Whether whole blocks go over a row in a loop, once for each pass.
  bool loops_over_rows() const { return shape_.loops && !shape_.is_split; }

  // Whether a loop may be left out, since all reductions are of the column of the same label.
  bool is_at_one_label(const std::vector<int>& reduced) const {
    return loops_over_rows() && !reduced.empty() &&
           std::all_of(reduced.begin(), reduced.end(), [&](int value) {
             return body_.is_at_label(value) && label_name(value) == label_name(reduced[0]);
           });
  }

  // The largest number of a row, if the pass computes it together with the sum of exponentials, so
  // that the pass after it has nothing to do; else -1. In registers a row is read but once in any
  // case.
  int largest_of_joined(int pass) const {
    if (pass < 0 || pass >= body_.last_pass || !loops_over_rows()) return -1;
    if (pass + 1 == body_.last_pass && (has_full_stores() || has_full_sums())) return -1;
    const std::vector<int> next = body_.reductions_of(pass + 1);
    for (int value : body_.reductions_of(pass)) {
      if (next.size() == 1 && body_.sum_of_exponentials(value) == next[0]) return value;
    }
    return -1;
  }

  // Writes a pass and the one after it as one.
  void write_joined_pass(int pass, int largest) {
    const int sum = body_.sum_of_exponentials(largest);
    std::vector<int> others = body_.reductions_of(pass);
    std::erase(others, largest);
    const std::vector<int> needed = body_.needed_in(pass, made_);
    noted(largest, "wide ", name(largest), " = Largest::start();");
    noted(sum, "wide ", name(sum), " = Sum::start();");
    for (int value : others) write_start(value);
    read_first_ = read_first(needed);
    open_loop();
    open_vectors_of_pass(needed);
    out()("wide each[", shape_.vector, "];");
    open_lanes();
    for (int value : needed) write_lane(value);
    const std::string number = ref(at(largest).operands[0]), exists = condition_of_lanes();
    out()("each[i] = ", exists.empty() ? number : concat(exists, " ? ", number, " : -infinity()"),
          ";");
    if (!others.empty()) write_guard_of_lanes();
    for (int value : others) write_reduction(value);
    out()("}");
    out()("add_exponentials(", name(largest), ", ", name(sum), ", each);");
    out()("}");
    out()("}");
    noted(sum, "join_exponentials<", shape_.threads_x, ">(", name(largest), ", ", name(sum),
          ", shared);");
    for (int value : others) finish_reduction(value);
  }

  void write_start(int value) {
    noted(value, "wide ", name(value), " = ", operation(at(value).reduction), "::start();");
  }

  // Reads what the pass needs, and opens its loop over vectors.
  void open_vectors_of_pass(const std::vector<int>& needed) {
    write_first_reads(needed);
    open_vectors_of_row();
    for (int value : needed) {
      if (!is_hoisted(value) && !read_first_[value]) write_load(value);
    }
  }

  bool has_full_stores() const {
    return std::any_of(body_.stores.begin(), body_.stores.end(),
                       [](const Store& store) { return store.is_full; });
  }
  bool has_full_sums() const {
    return std::any_of(body_.sums.begin(), body_.sums.end(),
                       [](const RowsSum& sum) { return !sum.is_of_rows; });
  }
  bool has_full_totals() const {
    return std::any_of(body_.sums.begin(), body_.sums.end(),
                       [](const RowsSum& sum) { return sum.is_total && !sum.is_of_rows; });
  }

  void write_first_reads(const std::vector<int>& needed) {
    std::vector<int> values;
    for (int value : needed) {
      if (read_first_[value]) values.push_back(value);
    }
    if (values.empty()) return;
    for (int value : values) {
      if (!is_kept_[value]) declare(value);
    }
    open_vectors_of_row();
    for (int value : values) write_load(value);
    out()("}");
  }

  // Writes the loads from memory and the random draws of a value, a vector at a time.
  void write_load(int value) {
    const Value& each = at(value);
    if (!is_array(value)) return;
    if (!has_vectors(value)) declare(value);
    if (each.kind == Kind::kRandom) {
      noted(value, "draw(", array(value), ", seed", value, ", stream", value,
            ", u64(row) * u64(columns) + u64(column), ", limit(each), "u);");
      return;
    }
    const Access& access = body_.inputs[each.input];
    const std::string name = concat("in", each.input);
    std::string from = each.space == Space::kColumn ? name : concat("at", each.input);
    if (each.kind == Kind::kGather) {
      out()("if (id", value, " == kBad) {");
      open_lanes();
      out()(array(value), ".at[i] = narrow<", element(body_.inputs[each.input].dtype),
            ">(not_a_number());");
      out()("}");
      out()("} else {");
      from = concat("(", name, " + id", value, " * ", name, "_row)");
    }
    if (plan_.input_shifts[each.input] != 0) {
      noted(value, "load_across(", array(value), ", ", from, " + column, before", each.input,
            ", columns - column);");
    } else if (plan_.input_vectors[each.input]) {
      noted(value, "load(", array(value), ", ", from, " + ", vector_offset(access, name), left(),
            ");");
    } else {
      noted(value, "load_each(", array(value), ", ", from, ", [&](int i) { return ",
            column_offset(access, name, "(column + i)"), "; });");
    }
    if (each.kind == Kind::kGather) out()("}");
  }

  // The last arguments of an access to a vector of which some elements may not exist.
  std::string left() const {
    if (shape_.shift > 0) return ", column, columns";
    return shape_.has_tail ? ", columns - column" : "";
  }

  const char* minus_shift() const { return shape_.shift > 0 ? " - shift" : ""; }

  // Elements of a vector that do not exist add nothing to a reduction or a total. What is computed
  // of them otherwise, nobody reads: not even the sum of a column, whose line has whole vectors.
  void write_guard_of_lanes() {
    const std::string exists = condition_of_lanes();
    if (!exists.empty()) out()("if (!(", exists, ")) continue;");
  }
  // Whether an element of a vector exists; empty if all do.
  std::string condition_of_lanes() const {
    if (shape_.shift > 0) return "is_within(column + i, columns)";
    return shape_.has_tail ? "column + i < columns" : "";
  }

  void write_lane(int value) {
    const Value& each = at(value);
    if (is_hoisted(value) || is_array(value)) return;
    std::string made;
    if (each.kind == Kind::kScatter) {
      const std::string label = label_name(value);
      made = concat("column + i == ", label, " ? ", ref(each.operands[1]), " : ", label,
                    " == kBad ? not_a_number() : wide(0)");
    } else {
      ORT_CHECK(each.kind == Kind::kPointwise, "CUDA: value ", value,
                " has no number for each column");
      made = call(value);
    }
    noted(value, is_kept_[value] ? "" : "const wide ", ref(value), " = ", made, ";");
  }

  void write_reduction(int value) {
    const Value& each = at(value);
    const std::string of = ref(each.operands[0]);
    if (each.reduction == Reduction::kPick) {
      out()("if (column + i == ", label_name(value), ") ", name(value), " = ", of, ";");
    } else {
      out()(name(value), " = ", operation(each.reduction), "::of(", name(value), ", ", of, ");");
    }
  }

  void reduce_in_block(int value) {
    noted(value, name(value), " = reduce_row<", operation(at(value).reduction), ", ",
          shape_.threads_x, ">(", name(value), ", shared);");
  }
  void finish_reduction(int value) {
    reduce_in_block(value);
    check_label(value);
  }
  void check_label(int value) {
    const bool is_pick = at(value).reduction == Reduction::kPick;
    if (!is_pick && !(loops_over_rows() && body_.is_at_label(value))) return;
    out()("if (", label_name(value), " == kBad) ", name(value), " = not_a_number();");
  }

  static bool is_reduced(const Value& value) { return value.kind == Kind::kReduced; }
  // The place of what all strips of the row have found.
  std::string parts(int value) const {
    const int64_t index =
        std::count_if(body_.values.begin(), body_.values.begin() + value, is_reduced);
    return concat("parts + (i64(row) * ", result_.reductions, " + ", index, ") * strips");
  }
  void write_part(int value) {
    reduce_in_block(value);
    out()("if (is_row && threadIdx.x == 0) (", parts(value), ")[strip] = ", name(value), ";");
  }
  void combine_parts(int value) {
    noted(value, "wide ", name(value), " = reduce_parts<", operation(at(value).reduction), ", ",
          shape_.threads_x, ">(", parts(value), ", strips, shared);");
    check_label(value);
  }

  // Whether the store writes a vector as it was read. Booleans become 0 or 1.
  bool is_stored_as_it_is(const Store& store) const {
    if (at(store.value).space != Space::kFull || !is_pack(store.value)) return false;
    const DType dtype = body_.inputs[at(store.value).input].dtype;
    return dtype == store.to.dtype && dtype != DType::kBool;
  }
  void declare_stored() {
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Store& store = body_.stores[i];
      if (store.is_full && !is_stored_as_it_is(store)) {
        out()("Pack<", element(store.to.dtype), ", ", shape_.vector, "> result", i, ";");
      }
    }
  }
  void write_last_lanes() {
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Store& store = body_.stores[i];
      if (store.is_full && !is_stored_as_it_is(store)) {
        out()("result", i, ".at[i] = narrow<", element(store.to.dtype), ">(", ref(store.value),
              ");");
      }
    }
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const RowsSum& sum = body_.sums[i];
      if (sum.is_total) continue;
      const char* const place = shape_.loops ? "[column + i]" : "[e][i]";
      noted_output(sum.to, "sum", i, place, " += ", ref(sum.value), ";");
    }
  }
  void write_totals() {
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const RowsSum& sum = body_.sums[i];
      if (sum.is_total && !sum.is_of_rows) {
        noted_output(sum.to, "sum", i, " += ", ref(sum.value), ";");
      }
    }
  }
  void write_stores() {
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Store& store = body_.stores[i];
      if (!store.is_full) continue;
      const std::string from = is_stored_as_it_is(store) ? array(store.value) : concat("result", i);
      if (plan_.store_vectors[i]) {
        noted_output(store.to, "store(to", i, " + ", vector_offset(store.to, concat("out", i)),
                     ", ", from, left(), ");");
      } else {
        noted_output(store.to, "store_each(to", i, ", ", from, ", [&](int i) { return ",
                     column_offset(store.to, concat("out", i), "(column + i)"), "; });");
      }
    }
  }

  // Results of a row are written by its first thread and for its first strip.
  void write_row_results() {
    const std::string first =
        concat("is_row && threadIdx.x == 0", plan_.has_strips() ? " && first_column == 0" : "");
    for (size_t i = 0; i < body_.stores.size(); ++i) {
      const Store& store = body_.stores[i];
      if (store.is_full) continue;
      noted_output(store.to, "if (", first, ") out", i, "[",
                   offset(store.to.rows, concat("out", i, "_row"), "row"), "] = narrow<",
                   element(store.to.dtype), ">(", ref(store.value), ");");
    }
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const RowsSum& sum = body_.sums[i];
      if (!sum.is_of_rows) continue;
      noted_output(sum.to, "if (", first, ") sum", i, " += ", ref(sum.value), ";");
    }
  }

  void write_ends_of_sums(int stage) {
    int64_t offset = 0, total = 0;
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const RowsSum& sum = body_.sums[i];
      const int64_t of_total = sum.is_total ? total++ : 0;
      if (!is_in(stage, sum)) continue;
      if (sum.is_total) {
        out()("sum", i, " = sum_block<", shape_.threads_x, ", ", shape_.threads_y, ">(sum", i,
              ", shared);");
        const char* const place = plan_.has_strips() ? "(block * strips + strip)" : "block";
        out()("if (threadIdx.x == 0 && threadIdx.y == 0) totals[", place, " * ",
              result_.partial_totals, " + ", of_total, "] = sum", i, ";");
      } else if (!shape_.loops) {
        out()("write_partial_sums<", shape_.threads_x, ", ", shape_.threads_y, ">(",
              line_of_sums(offset), ", sum", i, ", first_column, columns, shared);");
      }
      if (!sum.is_total) ++offset;
    }
  }

  // ---- the kernel that adds the partial sums of blocks

  void write_finish() {
    parameters_ = &result_.finish_parameters;
    out_ = &finish_;
    if (has_column_sums()) pointer(Parameter::Kind::kColumnSums, "const wide*", "column_sums");
    if (result_.partial_totals > 0) pointer(Parameter::Kind::kTotals, "const wide*", "totals");
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const Access& to = body_.sums[i].to;
      pointer(Parameter::Kind::kOutput, concat(element(to.dtype), "*"), concat("sum", i), to.result,
              to.begin);
    }
    integer("columns", columns_);
    if (has_column_sums()) integer("columns_of_sums", columns_of_sums());
    integer("blocks_per_group", shape_.blocks_per_group);
    integer("strips", shape_.strips);
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      add_access(body_.sums[i].to, concat("sum", i), true, !body_.sums[i].is_total);
    }
    out()("// Adds up the partial sums of blocks, in order: one sum for each blockIdx.y.");
    out()("extern \"C\" __global__ void __launch_bounds__(256)");
    out()("@NAME@_finish(", signature(result_.finish_parameters), ") {");
    out()("SHARED(memory);");
    out()("wide* const shared = reinterpret_cast<wide*>(memory);");
    out()("const index_t parts = ",
          has_column_sums() ? "max((columns + 31) / 32, index_t(1))" : "1", ";");
    out()("const index_t group = blockIdx.x / parts, column = blockIdx.x % parts * 32;");
    if (result_.partial_totals > 0) write_finish_of_totals();
    if (has_column_sums()) write_finish_of_columns();
    out()("}");
  }

  std::string place_of_sum(size_t i) const {
    const std::string name = concat("sum", i);
    return concat(name, " + (", offset(body_.sums[i].to.rows, name + "_row", "group"), ")");
  }

  void write_finish_of_totals() {
    out()("const i64 count = i64(blocks_per_group) * strips;");
    int64_t total = 0;
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      if (!body_.sums[i].is_total) continue;
      noted_output(body_.sums[i].to, "if (blockIdx.y == ", i, ") {");
      out()("if (column == 0) finish_one(", place_of_sum(i), ", totals + group * count * ",
            result_.partial_totals, " + ", total++, ", count, ", result_.partial_totals,
            ", shared);");
      if (has_column_sums()) out()("return;");
      out()("}");
    }
  }

  // All sums of columns are added by the same code, which is a good part of what there is to
  // compile.
  void write_finish_of_columns() {
    std::string which;  // counted among the sums of columns
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      if (body_.sums[i].is_total) which += concat(" - (blockIdx.y > ", i, ")");
    }
    out()("const i64 stride = i64(", body_.num_column_sums(), ") * columns_of_sums;");
    out()("const wide* const parts_of_sum = column_sums + group * blocks_per_group * stride + ",
          "i64(blockIdx.y", which, ") * columns_of_sums;");
    out()("const wide sum = add_lines(parts_of_sum, blocks_per_group, stride, column, columns, ",
          "shared);");
    out()("const index_t at = column + threadIdx.x;");
    out()("if (threadIdx.y != 0 || at >= columns) return;");
    for (size_t i = 0; i < body_.sums.size(); ++i) {
      const Access& to = body_.sums[i].to;
      if (body_.sums[i].is_total) continue;
      noted_output(to, "if (blockIdx.y == ", i, ") (", place_of_sum(i), ")[",
                   column_offset(to, concat("sum", i), "at"), "] = narrow<", element(to.dtype),
                   ">(sum);");
    }
  }

  // ---- the whole text

  // A name from the first few operators, which profilers show.
  std::string readable_name() const {
    std::vector<std::string> words;
    for (const Value& value : body_.values) {
      const std::string word = value.origin.substr(0, value.origin.find(' '));
      if (word.empty() || std::find(words.begin(), words.end(), word) != words.end()) continue;
      words.push_back(word);
    }
    constexpr size_t kMostWords = 5;
    std::string name;
    for (size_t i = 0; i < std::min(words.size(), kMostWords); ++i) name += words[i] + "_";
    if (words.size() > kMostWords) name += "more_";
    return name.empty() ? "copy_" : name;
  }

  static std::string named(std::string text, const std::string& name) {
    constexpr std::string_view kPlace = "@NAME@";
    for (size_t at = text.find(kPlace); at != std::string::npos; at = text.find(kPlace, at)) {
      text.replace(at, kPlace.size(), name);
    }
    return text;
  }

  KernelText assemble() {
    const std::string head = type_head(plan_.is_double, plan_.wide_index);
    const std::string code = kernel_.str(false) + finish_.str(false);
    result_.name = readable_name() + hex(hash(head + prelude() + code)).substr(0, 12);
    result_.text = head + prelude() + "\n" + named(code, result_.name);
    result_.listing = head + named(kernel_.str(true) + finish_.str(true), result_.name);
    return std::move(result_);
  }

  Lines& out() { return *out_; }
  template <typename... Parts>
  void noted(int value, const Parts&... parts) {
    const Value& each = at(value);
    const bool is_input = each.kind == Kind::kInput;
    out_->noted(concat(parts...),
                is_input ? concat("input '", body_.input_names[each.input], "'") : each.origin);
  }
  // Writes a line with a note that names the output which it writes.
  template <typename... Parts>
  void noted_output(const Access& to, const Parts&... parts) {
    out_->noted(concat(parts...), concat("output '", body_.output_names[to.result], "'"));
  }

  const Plan& plan_;
  const Body& body_;
  const Geometry& shape_;
  int64_t rows_, columns_, groups_;
  std::vector<bool> is_kept_;  // by value: in registers from one pass to the next
  // By value: as `read_first` says of the pass that is being written.
  std::vector<bool> read_first_ = std::vector<bool>(body_.values.size(), false);
  // By value: already written.
  std::vector<bool> made_ = std::vector<bool>(body_.values.size(), false);
  std::set<int> used_, read_inputs_, tables_;
  std::set<std::string> labels_;  // labels that are already written
  KernelText result_;
  std::vector<Parameter>* parameters_ = nullptr;
  Lines kernel_, finish_;
  Lines* out_ = nullptr;
};

}  // namespace

// Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994.
uint64_t factor_and_shift(int64_t divisor) {
  const auto by = static_cast<uint64_t>(std::max<int64_t>(1, divisor));
  if (by > std::numeric_limits<int32_t>::max()) return 0;  // then numbers have 64 bits
  const int shift = std::bit_width(by - 1);
  const uint64_t factor = ((((uint64_t{1} << shift) - by) << 32) / by) + 1;
  return factor | static_cast<uint64_t>(shift) << 32;
}

const char* element(DType dtype) {
  switch (dtype) {
    case DType::kFloat: return "float";
    case DType::kDouble: return "double";
    case DType::kBFloat16: return "bf16";
    case DType::kHalf: return "f16";
    case DType::kBool: return "boolean";
    case DType::kUInt8: return "u8";
    case DType::kInt8: return "i8";
    case DType::kInt16: return "i16";
    case DType::kInt32: return "i32";
    case DType::kInt64: return "i64";
    default: throw InternalError(concat("CUDA: dtype of an operand: got ", ir::name(dtype)));
  }
}

std::string type_head(bool is_double, bool wide_index) {
  return concat("typedef ", is_double ? "double" : "float", " wide;\n", "typedef ",
                wide_index ? "long long" : "int", " index_t;\n");
}

std::string KernelText::stage_name(int stage) const { return stage_name(stage, name); }
std::string KernelText::stage_name(int stage, const std::string& of) const {
  return stage + 1 < stages ? concat(of, "_stage", stage) : of;
}

KernelText write_kernel(const Plan& plan, int64_t rows, int64_t columns, int64_t groups) {
  return Writer(plan, rows, columns, groups).run();
}

}  // namespace torch_ort::cuda
