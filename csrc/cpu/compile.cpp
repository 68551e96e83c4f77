// Compiles the body of a region to instructions: in which phase each value is computed, and where
// it is stored.
#include "base/error.h"
#include "cpu/program.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>

namespace torch_ort::cpu {

namespace {

using ir::DType;
using ir::Node;
using ir::Value;
using ops::FusedForm;
using region::Schedule;
using Axes = Schedule::Axes;
using Step = Schedule::Step;

// Rows of up to this many times CompileOptions::tile_bytes are computed whole, longer ones in
// chunks.
constexpr int64_t kLongestWholeRow = 2;
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kMaxBlocks = 32;
constexpr int64_t kWorkPerBlock = 1 << 15;  // elements of a block times instructions

class Compiler {
 public:
  Compiler(const Schedule& schedule, const ir::SymbolLookup& lookup,
           const std::vector<Layout>& inputs, const std::vector<Layout>& outputs,
           const CompileOptions& options)
      : schedule_(schedule),
        bound_(schedule, lookup, inputs, outputs, can_load),
        body_(bound_.body),
        options_(options) {
    program_.isa = options.isa;
    program_.num_columns = bound_.num_columns;
    program_.num_rows = bound_.num_rows;
    program_.num_groups = bound_.num_groups;
    program_.has_row_list = schedule.spec.has_row_list;
    program_.is_double = bound_.is_double;
  }

  Program run() {
    choose_tile();
    add_inputs();
    for (const Step& step : schedule_.steps) add_step(step);
    add_outputs();
    for (Phase& phase : program_.phases) join_gradients(phase.full);
    place_values();
    check_overwrites();
    choose_blocks();
    return std::move(program_);
  }

 private:
  struct Info {
    Space space = Space::kFull;
    int phase = 0;           // the phase that computes it
    int input = -1;          // the full input or table from which it is loaded when it is read
    int ids = -1;            // the input that selects rows of the table
    int output = -1;         // the output into which it is computed
    bool stays = false;      // its register is kept from one tile to the next
    bool is_wide = false;    // a whole row is kept, since a later phase reads it chunk by chunk
    bool is_remade = false;  // each phase that reads it recomputes it, if rows are in chunks
    Opcode op = Opcode::kCopy;
    std::vector<int> made_of = {};  // the operands, if `op` computes it
  };

  Space space_of_input(size_t input) const { return schedule_.spec.spaces[input]; }

  // ---- sizes of tiles

  void choose_tile() {
    const int64_t numbers =
        std::max<int64_t>(1, options_.tile_bytes / (program_.is_double ? 8 : 4));
    const int64_t columns = std::max<int64_t>(1, program_.num_columns);
    const bool whole_rows = columns <= kLongestWholeRow * numbers;
    program_.chunk = whole_rows ? columns : numbers;
    program_.tile_rows = whole_rows ? std::clamp<int64_t>(numbers / columns, 1, kMaxTileRows) : 1;
    program_.tile_rows = std::clamp<int64_t>(bound_.rows_of_group(), 1, program_.tile_rows);
  }

  bool holds_whole_rows() const { return program_.chunk >= program_.num_columns; }

  // ---- values

  int add_value(Space space, int phase) {
    infos_.push_back({.space = space, .phase = phase});
    return static_cast<int>(infos_.size()) - 1;
  }

  int constant(double number) {
    const auto [found, is_new] = constants_.try_emplace(std::bit_cast<uint64_t>(number), -1);
    if (is_new) {
      found->second = add_value(Space::kScalar, 0);
      program_.constants.emplace_back(found->second, number);
    }
    return found->second;
  }

  Phase& phase(int index) {
    if (index >= static_cast<int>(program_.phases.size())) program_.phases.resize(index + 1);
    return program_.phases[index];
  }

  void emit(Instruction each, int in_phase) {
    if (each.space == Space::kScalar || each.space == Space::kColumn) {
      program_.prologue.push_back(each);
    } else if (each.space == Space::kRow) {
      phase(in_phase).row.push_back(each);
    } else {
      phase(in_phase).full.push_back(each);
    }
  }

  void add_inputs() {
    phase(0);
    for (size_t i = 0; i < body_.inputs.size(); ++i) {
      const Value& input = *body_.inputs[i];
      const Space space = space_of_input(i);
      program_.inputs.push_back(bound_.inputs[i]);
      if (space == Space::kTable || space == Space::kIds) continue;
      const int value = add_value(space, 0);
      values_[&input] = value;
      if (is_in_place(program_.inputs.back(), space)) {
        infos_[value].input = static_cast<int>(i);
        direct_inputs_.push_back(value);
        continue;
      }
      if (space == Space::kFull) {
        infos_[value].input = static_cast<int>(i);
        continue;
      }
      emit({.kind = Kind::kLoad, .space = space, .d = value, .index = static_cast<int>(i)}, 0);
    }
    for (const Value* initializer : body_.initializers) {
      // The others are axes and shapes, which instructions do not read.
      if (const std::optional<double> number = ops::known_double(initializer)) {
        values_[initializer] = constant(*number);
      }
    }
    for (const Node& node : body_.nodes) {
      if (!ir::is(&node, "SizeRatio", ir::kTorchOrtDomain) || node.is_erased()) continue;
      values_[node.outputs[0]] = constant(bound_.evaluate(ops::size_ratio(node)));
    }
  }

  // Whether instructions can read or write the operand in the caller's memory.
  bool is_in_place(const Access& access, Space space) const {
    const DType dtype = program_.is_double ? DType::kDouble : DType::kFloat;
    if (access.dtype != dtype || !access.is_one_run()) return false;
    if (space == Space::kColumn) return program_.tile_rows == 1;
    if (space != Space::kFull) return false;
    const bool rows_touch =
        access.rows.size() == 1 &&
        (access.rows[0].stride == program_.num_columns || access.rows[0].size == 1);
    return program_.tile_rows == 1 || rows_touch;
  }

  bool is_direct(int value) const {
    return std::find(direct_inputs_.begin(), direct_inputs_.end(), value) != direct_inputs_.end();
  }

  // The value, or its copy for each column if it is a row value.
  int full_operand(int value, int in_phase) {
    if (infos_[value].space == Space::kRow) return expand_row(value, in_phase);
    ORT_CHECK(infos_[value].space == Space::kFull, "Region: want a full value or one of rows");
    bool is_scalar = false;
    return operand(value, Space::kFull, in_phase, is_scalar);
  }

  int expand_row(int value, int in_phase) {
    return copy_in_phase(value, in_phase, {.kind = Kind::kExpandRow, .a = value});
  }

  // Which value an instruction of `in_phase` reads for this one if its result is in `space`.
  // `is_scalar`: the instruction reads a single number.
  int operand(int value, Space space, int in_phase, bool& is_scalar) {
    Info& info = infos_[value];
    is_scalar = info.space == Space::kScalar && space != Space::kScalar;
    if (space != Space::kFull) return value;
    if (info.space == Space::kRow) {
      if (program_.tile_rows == 1) {
        is_scalar = true;
        return value;
      }
      return expand_row(value, in_phase);
    }
    if (info.input >= 0 && !is_direct(value) && info.space == Space::kFull) {
      const Kind kind = info.ids >= 0 ? Kind::kGather : Kind::kLoad;
      return copy_in_phase(value, in_phase, {.kind = kind, .index = info.input, .ids = info.ids});
    }
    const bool is_made_earlier = info.space == Space::kFull && info.phase < in_phase;
    if (is_made_earlier && !holds_whole_rows() && info.input < 0) {
      if (info.is_remade) return make_again(value, in_phase);
      info.is_wide = true;
    }
    return value;
  }

  int make_again(int value, int in_phase) {
    for (const auto& [made_in, copy] : copies_[value]) {
      if (made_in == in_phase) return copy;
    }
    const Info info = infos_[value];  // a copy, since infos_ grows below
    const int copy = pointwise(info.op, info.made_of, Space::kFull, in_phase);
    copies_[value].emplace_back(in_phase, copy);
    return copy;
  }

  // A full copy of a value. Each phase that reads it makes its own, unless chunks are whole rows.
  int copy_in_phase(int value, int in_phase, Instruction each) {
    for (const auto& [made_in, copy] : copies_[value]) {
      if (made_in == in_phase || (holds_whole_rows() && made_in < in_phase)) return copy;
    }
    each.space = Space::kFull;
    each.d = add_value(Space::kFull, in_phase);
    each.stays = each.kind == Kind::kLoad && holds_whole_rows() &&
                 program_.inputs[each.index].repeats_rows();
    infos_[each.d].stays = each.stays;
    copies_[value].emplace_back(in_phase, each.d);
    emit(each, in_phase);
    return each.d;
  }

  // ---- nodes

  void add_step(const Step& step) {
    const Node& node = *step.node;
    switch (step.form.kind) {
      case FusedForm::Kind::kNone:
        throw InternalError(concat("Region: no instruction for ", node.op.str()));
      case FusedForm::Kind::kPass:
        values_[node.outputs[0]] = node.op.name == "Cast" ? rounded(step, value_of(node.inputs[0]))
                                                          : value_of(node.inputs[0]);
        return;
      case FusedForm::Kind::kPointwise: add_pointwise(step); return;
      case FusedForm::Kind::kPick: add_pick(step); return;
      case FusedForm::Kind::kScatter: add_scatter(step); return;
      case FusedForm::Kind::kValid: add_valid(step); return;
      case FusedForm::Kind::kRandom: add_random(step); return;
      case FusedForm::Kind::kConcat: return;  // add_outputs() stores its operands
      case FusedForm::Kind::kGather: add_gather(step); return;
      default: add_reduction(step); return;
    }
  }

  int value_of(const Value* value) const {
    const auto found = values_.find(value);
    ORT_CHECK(found != values_.end(), "Region: value '", value != nullptr ? value->name : "",
              "' comes from nowhere");
    return found->second;
  }

  void add_pointwise(const Step& step) {
    std::vector<int> operands;
    for (const Value* input : step.node->inputs) operands.push_back(value_of(input));
    for (double number : step.form.constants) operands.push_back(constant(number));
    const int value = pointwise(step.form.op, operands, step.space, step.phase);
    infos_[value].is_remade = step.is_remade;
    values_[step.node->outputs[0]] = rounded(step, value);
  }

  // The result of a step, rounded to its dtype if the schedule or the options say so.
  int rounded(const Step& step, int value) {
    const DType dtype = step.node->outputs[0]->type.dtype;
    if (!step.is_rounded && !options_.round_short_floats) return value;
    if (!ir::is_short_float(dtype)) return value;
    const Opcode op = dtype == DType::kHalf ? Opcode::kToHalf : Opcode::kToBFloat16;
    return pointwise(op, {value}, infos_[value].space, infos_[value].phase);
  }

  int pointwise(Opcode op, const std::vector<int>& operands, Space space, int in_phase) {
    Instruction each{.space = space, .op = op};
    int* const slots[] = {&each.a, &each.b, &each.c};
    for (size_t i = 0; i < operands.size(); ++i) {
      bool is_scalar = false;
      *slots[i] = operand(operands[i], space, in_phase, is_scalar);
      if (is_scalar) each.scalars |= static_cast<uint8_t>(1 << i);
    }
    each.d = add_value(space, in_phase);
    infos_[each.d].op = op;
    infos_[each.d].made_of = operands;
    emit(each, in_phase);
    return each.d;
  }

  void add_reduction(const Step& step) {
    const int value = value_of(step.node->inputs[0]);
    const Value* result = step.node->outputs[0];
    if (step.axes == Axes::kColumns) {
      values_[result] = rounded(step, reduce_rows(value, step.form.kind, step.phase));
    } else {
      sums_[result] = {value, &step};  // for add_outputs()
    }
  }

  int reduce_rows(int value, FusedForm::Kind kind, int in_phase) {
    const int full = full_operand(value, in_phase);
    const bool adds = kind == FusedForm::Kind::kSum || kind == FusedForm::Kind::kMean;
    const double infinity = std::numeric_limits<double>::infinity();
    const Kind each = adds                            ? Kind::kSumRows
                      : kind == FusedForm::Kind::kMax ? Kind::kMaxRows
                                                      : Kind::kMinRows;
    const double start = adds ? 0 : each == Kind::kMaxRows ? -infinity : infinity;
    const int result = start_row_result(start, in_phase);
    phase(in_phase).full.push_back({.kind = each, .d = result, .a = full});
    if (kind != FusedForm::Kind::kMean) return result;
    return pointwise(Opcode::kDiv, {result, constant(static_cast<double>(program_.num_columns))},
                     Space::kRow, in_phase + 1);
  }

  // A row value that a phase accumulates chunk by chunk; later phases read it.
  int start_row_result(double start, int in_phase) {
    const int value = add_value(Space::kRow, in_phase + 1);
    phase(in_phase).starts.push_back({value, start});
    phase(in_phase + 1);
    return value;
  }

  Instruction label_instruction(const Node& node, Kind kind) const {
    Instruction each{.kind = kind};
    each.has_ignored = ir::has_attr(node.attrs, "ignore_index");
    each.ignored = ir::int_attr(node.attrs, "ignore_index", 0);
    return each;
  }

  void add_pick(const Step& step) {
    const Node& node = *step.node;
    Instruction each = label_instruction(node, Kind::kPick);
    each.a = full_operand(value_of(node.inputs[0]), step.phase);
    each.b = value_of(node.inputs[1]);
    each.d = start_row_result(0, step.phase);
    phase(step.phase).full.push_back(each);
    values_[node.outputs[0]] = each.d;
  }

  void add_scatter(const Step& step) {
    const Node& node = *step.node;
    Instruction each = label_instruction(node, Kind::kScatter);
    each.a = value_of(node.inputs[0]);
    each.b = value_of(node.inputs[1]);
    if (infos_[each.b].space == Space::kScalar) each.scalars = 2;
    each.d = add_value(Space::kFull, step.phase);
    emit(each, step.phase);
    values_[node.outputs[0]] = each.d;
  }

  void add_valid(const Step& step) {
    const Node& node = *step.node;
    const int label = value_of(node.inputs[0]);
    int& valid = values_[node.outputs[0]];
    if (!ir::has_attr(node.attrs, "ignore_index")) {
      valid = pointwise(Opcode::kEqual, {label, label}, step.space, step.phase);
      return;
    }
    const auto ignored = static_cast<double>(ir::int_attr(node.attrs, "ignore_index", 0));
    const int is_ignored =
        pointwise(Opcode::kEqual, {label, constant(ignored)}, step.space, step.phase);
    valid = pointwise(Opcode::kNot, {is_ignored}, step.space, step.phase);
  }

  // The phases that read the result load the rows.
  void add_gather(const Step& step) {
    const int value = add_value(Space::kFull, step.phase);
    infos_[value].input = bound_.input_index(*step.node, 0);
    infos_[value].ids = bound_.input_index(*step.node, 1);
    values_[step.node->outputs[0]] = value;
  }

  // The seed is read in place, since a load would convert the integer to a float.
  void add_random(const Step& step) {
    const Node& node = *step.node;
    Instruction each{.kind = Kind::kRandom, .space = step.space};
    each.index = bound_.input_index(node, 0);
    each.stream = ir::int_attr(node.attrs, "stream", 0);
    each.keep = ir::float_attr(node.attrs, "keep", 1);
    each.d = add_value(each.space, step.phase);
    emit(each, step.phase);
    values_[node.outputs[0]] = each.d;
  }

  // ---- outputs

  void add_outputs() {
    for (size_t i = 0; i < body_.outputs.size(); ++i) {
      const int result = static_cast<int>(i);
      const Value& output = *body_.outputs[i];
      const auto sum = sums_.find(&output);
      if (sum != sums_.end()) {
        add_sum_output(result, sum->second.first, *sum->second.second);
        continue;
      }
      for (const auto& [value, layout, begin] : bound_.parts_of_output(i)) {
        add_stored_output(*value, value_of(value), layout, result, begin);
      }
    }
  }

  // Adds an output of the program: an output of the node, or a part of one.
  int add_output(Access access, int result, int64_t begin = 0) {
    access.result = result;
    access.begin = begin;
    program_.outputs.push_back(std::move(access));
    return static_cast<int>(program_.outputs.size()) - 1;
  }

  void add_sum_output(int result, int value, const Step& step) {
    const Axes axes = step.axes;
    Accumulator accumulator{.offset = program_.accumulators_size};
    accumulator.size = axes == Axes::kAll ? 1 : program_.num_columns;
    accumulator.output =
        add_output(bound_.sums_access(bound_.output_layouts[result], accumulator.size), result);
    program_.accumulators_size += accumulator.size;
    Instruction each{.kind = Kind::kAddColumns};
    if (axes == Axes::kAll) {
      if (step.reduced == Space::kFull) {
        value = reduce_rows(value, FusedForm::Kind::kSum, infos_[value].phase);
      }
      each = {.kind = Kind::kAddAll, .space = Space::kRow};
      each.a = value;
    } else {
      each.a = full_operand(value, infos_[value].phase);
    }
    each.index = static_cast<int>(program_.accumulators.size());
    program_.accumulators.push_back(accumulator);
    emit(each, infos_[value].phase);
  }

  void add_stored_output(const Value& output, int value, const Layout& layout, int result,
                         int64_t begin) {
    const Info info = infos_[value];  // a copy, since infos_ grows below
    ORT_CHECK(info.space == Space::kFull || info.space == Space::kRow, "Region: output '",
              output.name, "' has neither rows nor columns");
    // A row value is repeated along its row if the output is full. If there are no rows, all
    // outputs are empty, and none is repeated.
    const bool is_spread = info.space == Space::kRow && program_.num_columns != 1 &&
                           program_.num_rows != 0 && bound_.is_full_size(layout.sizes);
    const Space space = is_spread ? Space::kFull : info.space;
    const int index = add_output(bound_.checked_access(layout, space), result, begin);
    const bool is_made_here = info.space == Space::kFull && info.input < 0 && info.output < 0;
    if (is_made_here && is_in_place(program_.outputs.back(), space)) {
      infos_[value].output = index;
      return;
    }
    Instruction each{.kind = Kind::kStore, .space = space, .index = index};
    bool is_scalar = false;
    each.a = is_spread ? copy_in_phase(value, info.phase, {.kind = Kind::kExpandRow, .a = value})
                       : operand(value, space, info.phase, is_scalar);
    emit(each, info.phase);
  }

  // ---- words with their gradients

  // Computes a word together with its gradient, if that comes later and nobody reads the word's
  // result before. The gradient reads what the word reads, so that no operand is read later than it
  // was.
  static void join_gradients(std::vector<Instruction>& list) {
    for (size_t at = 0; at < list.size(); ++at) {
      Instruction& gradient = list[at];
      const std::optional<Opcode> op = word_of_gradient(gradient.op);
      if (gradient.kind != Kind::kElementwise || !op || gradient.scalars != 0) continue;
      const auto end = list.begin() + static_cast<std::ptrdiff_t>(at);
      const auto word = std::find_if(list.begin(), end, [&](const Instruction& each) {
        return each.kind == Kind::kElementwise && each.op == *op && each.a == gradient.b &&
               each.scalars == 0;
      });
      const bool is_read = std::any_of(word, end, [&](const Instruction& each) {
        return each.a == word->d || each.b == word->d || each.c == word->d;
      });
      if (word == end || is_read || gradient.a == word->d) continue;
      gradient.kind = Kind::kWithGradient;
      gradient.gradient = gradient.d;
      gradient.d = word->d;
      list.erase(word);
      --at;
    }
  }

  // ---- places

  void place_values() {
    program_.places.resize(infos_.size());
    find_last_uses();
    for (size_t value = 0; value < infos_.size(); ++value) place_kept(static_cast<int>(value));
    place_passing();
  }

  int64_t allocate(int64_t size) {
    constexpr int64_t kLine = 16;
    const int64_t offset = program_.worker_size;
    program_.worker_size += (size + kLine - 1) / kLine * kLine;
    return offset;
  }

  // Places values in the caller's memory, and values that live longer than one chunk of a tile.
  void place_kept(int value) {
    const Info& info = infos_[value];
    Place& place = program_.places[value];
    if (is_direct(value)) {
      place = {.kind = Place::Kind::kInput, .index = info.input};
    } else if (info.output >= 0) {
      place = {.kind = Place::Kind::kOutput, .index = info.output};
    } else if (info.space == Space::kRow || info.space == Space::kScalar) {
      place = {Place::Kind::kRegister,
               allocate(info.space == Space::kRow ? program_.tile_rows : 1)};
    } else if (info.stays) {
      place = {Place::Kind::kRegister, allocate(program_.tile_rows * program_.num_columns)};
    } else if (info.space == Space::kColumn || info.is_wide) {
      place = {Place::Kind::kWide, allocate(program_.tile_rows * program_.num_columns)};
    }
  }

  // Places full values that only their own chunk reads, in registers that are reused after that.
  void place_passing() {
    const int64_t size = program_.tile_rows * program_.chunk;
    std::vector<int64_t> idle;
    int time = 0;
    for (const Phase& phase : program_.phases) {
      for (const Instruction& each : phase.full) {
        for (int operand : {each.a, each.b, each.c}) {
          if (operand >= 0 && is_passing(operand) && last_use_[operand] == time) {
            idle.push_back(program_.places[operand].offset);
            last_use_[operand] = -1;  // a value may be an operand twice
          }
        }
        std::vector<int64_t> unread;
        for (int result : {each.d, each.gradient}) {
          if (result < 0 || !is_passing(result)) continue;
          Place& place = program_.places[result];
          if (place.kind != Place::Kind::kNone) continue;
          if (idle.empty()) idle.push_back(allocate(size));
          place = {Place::Kind::kRegister, idle.back()};
          idle.pop_back();
          if (last_use_[result] < 0) unread.push_back(place.offset);
        }
        idle.insert(idle.end(), unread.begin(), unread.end());
        ++time;
      }
    }
  }

  bool is_passing(int value) const {
    const Info& info = infos_[value];
    return info.space == Space::kFull && info.output < 0 && !is_direct(value) && !info.is_wide &&
           !info.stays;
  }

  void find_last_uses() {
    last_use_.assign(infos_.size(), -1);
    int time = 0;
    for (const Phase& phase : program_.phases) {
      for (const Instruction& each : phase.full) {
        for (int operand : {each.a, each.b, each.c}) {
          if (operand >= 0) last_use_[operand] = time;
        }
        ++time;
      }
    }
  }

  // The planner may place the first output in the memory of an overwritable input. Checks that no
  // instruction reads such an input after it is written, since results would then be wrong.
  void check_overwrites() const {
    for (int input : schedule_.overwritable) {
      bool is_written = false;
      for (const Phase& phase : program_.phases) {
        for (const auto* list : {&phase.row, &phase.full}) {
          for (const Instruction& each : *list) {
            ORT_CHECK(!is_written || !reads_input(each, input), "Region: input ", input,
                      " is read after the first output is written over it");
            is_written = is_written || writes_output(each, 0);
          }
        }
      }
    }
  }

  bool reads_input(const Instruction& each, int input) const {
    if (each.kind == Kind::kLoad) return each.index == input;
    const auto is_there = [&](int value) {
      return value >= 0 && program_.places[value].kind == Place::Kind::kInput &&
             program_.places[value].index == input;
    };
    return is_there(each.a) || is_there(each.b) || is_there(each.c);
  }

  bool writes_output(const Instruction& each, int result) const {
    if (each.kind == Kind::kStore) return program_.outputs[each.index].result == result;
    const auto is_there = [&](int value) {
      if (value < 0) return false;
      const Place& place = program_.places[value];
      return place.kind == Place::Kind::kOutput && program_.outputs[place.index].result == result;
    };
    return is_there(each.d) || is_there(each.gradient);
  }

  void choose_blocks() {
    if (program_.accumulators.empty()) return;
    const int64_t rows = bound_.rows_of_group();
    const int64_t work =
        rows * program_.num_columns * static_cast<int64_t>(program_.num_instructions());
    const int64_t tiles = (rows + program_.tile_rows - 1) / program_.tile_rows;
    // Each block writes and reads its sums once more, which is to be little beside what it reads.
    const int64_t rows_per_block =
        2 * program_.accumulators_size / std::max<int64_t>(1, program_.num_columns);
    const int64_t most = rows / std::max<int64_t>(1, rows_per_block);
    const int64_t limit = kMaxBlocks / std::clamp<int64_t>(program_.num_groups, 1, kMaxBlocks);
    program_.num_blocks =
        std::clamp<int64_t>(std::min({work / kWorkPerBlock, tiles, most}), 1, limit);
  }

  const Schedule& schedule_;
  const region::BoundSchedule bound_;
  const ir::Graph& body_;
  const CompileOptions& options_;
  Program program_;
  std::vector<Info> infos_;  // by value
  std::unordered_map<const Value*, int> values_;
  std::unordered_map<const Value*, std::pair<int, const Step*>> sums_;
  std::map<uint64_t, int> constants_;  // by bits, which tell 0 from -0 and are equal for NaN
  std::vector<int> direct_inputs_;
  std::unordered_map<int, std::vector<std::pair<int, int>>> copies_;  // by value: phase and copy
  std::vector<int> last_use_;
};

std::string operand_text(int value) { return value < 0 ? "" : concat(" %", value); }

std::string text(const Instruction& each) {
  static constexpr const char* kKinds[] = {"",          "",        "Load",       "Gather",  "Store",
                                           "ExpandRow", "SumRows", "MaxRows",    "MinRows", "Pick",
                                           "Scatter",   "Random",  "AddColumns", "AddAll"};
  static constexpr const char* kSpaces[] = {"scalar", "column", "row", "full"};
  std::string line = each.d < 0 ? std::string() : concat("%", each.d, " = ");
  if (each.kind == Kind::kWithGradient) {
    line = concat("%", each.d, ", %", each.gradient, " = ");
    line += concat(ops::word(*word_of_gradient(each.op)).name, ", ");
  }
  const bool has_word = each.kind == Kind::kElementwise || each.kind == Kind::kWithGradient;
  line += has_word ? ops::word(each.op).name : kKinds[static_cast<size_t>(each.kind)];
  if (each.index >= 0) line += concat(" #", each.index);
  line += operand_text(each.a) + operand_text(each.b) + operand_text(each.c);
  return concat(line, "  ", kSpaces[static_cast<size_t>(each.space)], "\n");
}

}  // namespace

size_t Program::num_instructions() const {
  size_t count = 0;
  for (const Phase& phase : phases) count += phase.full.size();
  return count;
}

std::string Program::str() const {
  std::string lines =
      concat(is_double ? "double " : "float ", name(isa), ", ", num_rows, " rows, ", num_columns,
             " columns, tile ", tile_rows, " x ", chunk, ", ", num_blocks, " blocks");
  lines += num_groups == 1 ? "\n" : concat(" of each of ", num_groups, " groups\n");
  for (const Instruction& each : prologue) lines += "  once: " + text(each);
  for (size_t i = 0; i < phases.size(); ++i) {
    lines += concat("phase ", i, "\n");
    for (const Instruction& each : phases[i].row) lines += "  row: " + text(each);
    for (const Instruction& each : phases[i].full) lines += "  " + text(each);
  }
  return lines;
}

bool can_load(DType dtype) {
  return kernels<float>(Isa::kPortable).load[static_cast<size_t>(dtype)] != nullptr;
}

std::unique_ptr<const Kernel> compile(const Schedule& schedule, const ir::SymbolLookup& lookup,
                                      const std::vector<Layout>& inputs,
                                      const std::vector<Layout>& outputs,
                                      const CompileOptions& options) {
  Program program = Compiler(schedule, lookup, inputs, outputs, options).run();
  return program.is_double ? make_runner<double>(std::move(program))
                           : make_runner<float>(std::move(program));
}

}  // namespace torch_ort::cpu
