#include "cuda/body.h"

#include "base/error.h"
#include "ops/op.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ops::FusedForm;
using ops::Pointwise;
using region::Schedule;
using Axes = Schedule::Axes;
using Kind = Value::Kind;
using Reduction = Value::Reduction;
using Step = Schedule::Step;

class Maker {
 public:
  Maker(const region::BoundSchedule& bound, bool round_short_floats)
      : bound_(bound), round_short_floats_(round_short_floats) {}

  Body run() {
    body_.inputs = bound_.inputs;
    for (const ir::Value* each : bound_.body.inputs) body_.input_names.push_back(each->name);
    for (const ir::Value* each : bound_.body.outputs) body_.output_names.push_back(each->name);
    add_inputs();
    for (const Step& step : bound_.schedule.steps) add_step(step);
    add_outputs();
    find_last_pass();
    return std::move(body_);
  }

 private:
  int add(Value value) {
    if (node_ != nullptr) value.origin = concat(node_->op.name, " '", node_->name, "'");
    body_.values.push_back(std::move(value));
    return static_cast<int>(body_.values.size()) - 1;
  }

  int constant(double number) { return add({.kind = Kind::kConstant, .number = number}); }

  void add_inputs() {
    for (size_t i = 0; i < bound_.body.inputs.size(); ++i) {
      const Space space = bound_.schedule.spec.spaces[i];
      if (space == Space::kTable || space == Space::kIds) continue;
      made_[bound_.body.inputs[i]] =
          add({.kind = Kind::kInput, .space = space, .input = static_cast<int>(i)});
    }
    for (const ir::Value* initializer : bound_.body.initializers) {
      // Initializers of other types state axes and shapes.
      if (const std::optional<double> number = ops::known_double(initializer)) {
        made_[initializer] = constant(*number);
      }
    }
    for (const ir::Node& node : bound_.body.nodes) {
      if (!ir::is(&node, "SizeRatio", ir::kTorchOrtDomain) || node.is_erased()) continue;
      made_[node.outputs[0]] =
          add({.kind = Kind::kRatio, .number = bound_.evaluate(ops::size_ratio(node))});
    }
  }

  int value_of(const ir::Value* value) const {
    const auto found = made_.find(value);
    ORT_CHECK(found != made_.end(), "Region: value '", value != nullptr ? value->name : "",
              "' is read before it is computed");
    return found->second;
  }

  void add_step(const Step& step) {
    node_ = step.node;
    const ir::Node& node = *step.node;
    int& result = made_[node.outputs[0]];
    switch (step.form.kind) {
      case FusedForm::Kind::kNone:
        throw InternalError(concat("Region: no kernel for ", node.op.str()));
      case FusedForm::Kind::kPass:
        result = value_of(node.inputs[0]);
        if (node.op.name == "Cast") result = rounded(step, result);
        return;
      case FusedForm::Kind::kPointwise: result = pointwise_step(step); return;
      case FusedForm::Kind::kPick:
        result = with_ignored(reduced(value_of(node.inputs[0]), Reduction::kPick, step.phase,
                                      value_of(node.inputs[1])));
        return;
      case FusedForm::Kind::kScatter: result = with_ignored(scatter(step)); return;
      case FusedForm::Kind::kValid: result = valid(step); return;
      case FusedForm::Kind::kRandom: result = random(step); return;
      // Its parts are written one by one.
      case FusedForm::Kind::kConcat: return;
      case FusedForm::Kind::kGather:
        result = add({.kind = Kind::kGather,
                      .space = Space::kFull,
                      .known_in = step.phase,
                      .input = bound_.input_index(node, 0),
                      .ids = bound_.input_index(node, 1)});
        return;
      default: break;
    }
    if (step.axes == Axes::kColumns) {
      result = rounded(step, along_row(value_of(node.inputs[0]), step.form.kind, step.phase));
    } else {
      sums_[node.outputs[0]] = {value_of(node.inputs[0]), &step};
    }
  }

  int pointwise_step(const Step& step) {
    std::vector<int> operands;
    for (const ir::Value* input : step.node->inputs) operands.push_back(value_of(input));
    for (double number : step.form.constants) operands.push_back(constant(number));
    return rounded(step, pointwise(step.form.op, std::move(operands), step.space, step.phase));
  }

  int pointwise(Pointwise op, std::vector<int> operands, Space space, int known_in) {
    return add({.kind = Kind::kPointwise,
                .space = space,
                .known_in = known_in,
                .op = op,
                .operands = std::move(operands)});
  }

  // The result of a step, rounded to its dtype if the schedule or the options say so.
  int rounded(const Step& step, int value) {
    const ir::DType dtype = step.node->outputs[0]->type.dtype;
    if (!step.is_rounded && !round_short_floats_) return value;
    if (!ir::is_short_float(dtype)) return value;
    const Pointwise op = dtype == ir::DType::kHalf ? Pointwise::kToHalf : Pointwise::kToBFloat16;
    const auto [space, known_in] =
        std::pair(body_.values[value].space, body_.values[value].known_in);
    return pointwise(op, {value}, space, known_in);
  }

  int along_row(int value, FusedForm::Kind kind, int pass) {
    if (kind == FusedForm::Kind::kMax) return reduced(value, Reduction::kMax, pass);
    if (kind == FusedForm::Kind::kMin) return reduced(value, Reduction::kMin, pass);
    const int sum = reduced(value, Reduction::kSum, pass);
    if (kind != FusedForm::Kind::kMean) return sum;
    return pointwise(Pointwise::kDiv, {sum, add({.kind = Kind::kColumns})}, Space::kRow, pass + 1);
  }

  int reduced(int value, Reduction reduction, int pass, int label = -1) {
    Value result{.kind = Kind::kReduced, .space = Space::kRow, .known_in = pass + 1};
    result.operands = {value};
    if (label >= 0) result.operands.push_back(label);
    result.reduction = reduction;
    return add(std::move(result));
  }

  int with_ignored(int value) {
    Value& each = body_.values[value];
    each.has_ignored = ir::has_attr(node_->attrs, "ignore_index");
    each.ignored = ir::int_attr(node_->attrs, "ignore_index", 0);
    return value;
  }

  int scatter(const Step& step) {
    return add({.kind = Kind::kScatter,
                .space = Space::kFull,
                .known_in = step.phase,
                .operands = {value_of(step.node->inputs[0]), value_of(step.node->inputs[1])}});
  }

  int valid(const Step& step) {
    const int label = value_of(step.node->inputs[0]);
    if (!ir::has_attr(step.node->attrs, "ignore_index")) {
      return pointwise(Pointwise::kEqual, {label, label}, step.space, step.phase);
    }
    const int64_t ignored = ir::int_attr(step.node->attrs, "ignore_index", 0);
    const int is_ignored = pointwise(
        Pointwise::kEqual, {label, constant(static_cast<double>(ignored))}, step.space, step.phase);
    return pointwise(Pointwise::kNot, {is_ignored}, step.space, step.phase);
  }

  int random(const Step& step) {
    if (step.space != Space::kFull && step.space != Space::kRow) {
      throw Unsupported(concat("Region: a random mask of ", region::name(step.space),
                               " values has no kernel on CUDA"));
    }
    Value value{.kind = Kind::kRandom, .space = step.space, .known_in = step.phase};
    value.input = bound_.input_index(*step.node, 0);
    value.stream = ir::int_attr(step.node->attrs, "stream", 0);
    value.keep = ir::float_attr(step.node->attrs, "keep", 1);
    return add(std::move(value));
  }

  void add_outputs() {
    node_ = nullptr;
    for (size_t i = 0; i < bound_.body.outputs.size(); ++i) {
      const auto sum = sums_.find(bound_.body.outputs[i]);
      if (sum != sums_.end()) {
        add_sum(static_cast<int>(i), sum->second.first, *sum->second.second);
        continue;
      }
      for (const auto& [value, layout, begin] : bound_.parts_of_output(i)) {
        add_store(static_cast<int>(i), value_of(value), layout, begin);
      }
    }
  }

  void add_sum(int result, int value, const Step& step) {
    RowsSum sum{.value = value};
    sum.is_total = step.axes == Axes::kAll;
    sum.is_of_rows = sum.is_total && step.reduced != Space::kFull;
    sum.to =
        bound_.sums_access(bound_.output_layouts[result], sum.is_total ? 1 : bound_.num_columns);
    sum.to.result = result;
    body_.sums.push_back(std::move(sum));
  }

  void add_store(int result, int value, const region::Layout& layout, int64_t begin) {
    const Space space = body_.values[value].space;
    ORT_CHECK(space == Space::kFull || space == Space::kRow, "Region: output ", result,
              " has neither rows nor columns");
    // If a region has no rows, its results have the size of the full space, but shapes of their
    // own.
    const bool is_spread = space == Space::kRow && bound_.num_columns != 1 &&
                           bound_.num_rows != 0 && bound_.is_full_size(layout.sizes);
    const bool is_full = space == Space::kFull || is_spread;
    Access to = bound_.checked_access(layout, is_full ? Space::kFull : Space::kRow);
    to.result = result;
    to.begin = begin;
    body_.stores.push_back({value, std::move(to), is_full});
  }

  void find_last_pass() {
    for (const Value& value : body_.values) {
      if (value.kind == Kind::kReduced) {
        body_.last_pass = std::max(body_.last_pass, value.known_in - 1);
      }
    }
    const auto note = [this](int value) {
      body_.last_pass = std::max(body_.last_pass, body_.values[value].known_in);
    };
    for (const Store& store : body_.stores) {
      if (store.is_full) note(store.value);
    }
    for (const RowsSum& sum : body_.sums) {
      if (!sum.is_of_rows) note(sum.value);
    }
  }

  const region::BoundSchedule& bound_;
  bool round_short_floats_;
  Body body_;
  const ir::Node* node_ = nullptr;
  std::unordered_map<const ir::Value*, int> made_;
  std::unordered_map<const ir::Value*, std::pair<int, const Step*>> sums_;
};

bool has_columns(const Value& value) {
  return value.space == Space::kFull || value.space == Space::kColumn;
}

}  // namespace

bool Body::reduces_rows() const {
  return std::any_of(values.begin(), values.end(),
                     [](const Value& value) { return value.kind == Kind::kReduced; });
}

int64_t Body::num_column_sums() const {
  return std::count_if(sums.begin(), sums.end(), [](const RowsSum& sum) { return !sum.is_total; });
}

std::vector<int> Body::reductions_of(int pass) const {
  std::vector<int> found;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].kind == Kind::kReduced && values[i].known_in == pass + 1) {
      found.push_back(static_cast<int>(i));
    }
  }
  return found;
}

int Body::sum_of_exponentials(int largest) const {
  if (values[largest].reduction != Reduction::kMax) return -1;
  const auto is = [this](int value, Pointwise op) {
    return values[value].kind == Kind::kPointwise && values[value].op == op;
  };
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].kind != Kind::kReduced || values[i].reduction != Reduction::kSum) continue;
    const int exponential = values[i].operands[0];
    if (!is(exponential, Pointwise::kExp)) continue;
    const int difference = values[exponential].operands[0];
    const std::vector<int> wanted = {values[largest].operands[0], largest};
    if (is(difference, Pointwise::kSub) && values[difference].operands == wanted) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

bool Body::is_at_label(int reduced) const {
  const Value& value = values[reduced];
  return value.reduction == Reduction::kPick ||
         (value.reduction == Reduction::kSum && values[value.operands[0]].kind == Kind::kScatter);
}

int Body::bytes_in_registers(const Value& value, int bytes_of_number) const {
  if (!is_read(value)) return bytes_of_number;
  return static_cast<int>(ir::size_bytes(inputs[value.input].dtype));
}

std::vector<int> Body::needed_in(int pass, const std::vector<bool>& kept) const {
  std::vector<bool> is_needed(values.size(), false);
  const std::function<void(int)> visit = [&](int value) {
    if (is_needed[value] || kept[value] || !has_columns(values[value])) return;
    is_needed[value] = true;
    for (int operand : values[value].operands) visit(operand);
  };
  for (int reduced : reductions_of(pass)) visit(values[reduced].operands[0]);
  if (pass == last_pass) {
    for (const Store& store : stores) {
      if (store.is_full) visit(store.value);
    }
    for (const RowsSum& sum : sums) {
      if (!sum.is_of_rows) visit(sum.value);
    }
  }
  std::vector<int> needed;  // in the order in which they are computed
  for (size_t i = 0; i < values.size(); ++i) {
    if (is_needed[i]) needed.push_back(static_cast<int>(i));
  }
  return needed;
}

std::vector<bool> Body::read_again() const {
  std::vector<bool> made(values.size(), false), again(values.size(), false);
  const std::vector<bool> none(values.size(), false);
  for (int pass = 0; pass <= last_pass; ++pass) {
    // The operands of a value that an earlier pass has computed are not read again, only the value
    // is.
    std::vector<int> made_now;
    for (int value : needed_in(pass, none)) {
      if (!made[value]) made_now.push_back(value);
    }
    const auto note = [&](int value) { again[value] = again[value] || made[value]; };
    for (int value : made_now) {
      for (int operand : values[value].operands) note(operand);
    }
    for (int reduced : reductions_of(pass)) note(values[reduced].operands[0]);
    if (pass == last_pass) {
      for (const Store& store : stores) note(store.value);
      for (const RowsSum& sum : sums) note(sum.value);
    }
    for (int value : made_now) made[value] = true;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (again[i] && is_made_quickly(values[i], again)) again[i] = false;
  }
  return again;
}

namespace {

// Whether the operation is fast, and gives the same bits wherever it stands. Compilers may join a
// product and a sum into one operation with one rounding, or not.
bool is_quick(ops::Pointwise op) {
  switch (op) {
    case ops::Pointwise::kCopy:
    case ops::Pointwise::kNeg:
    case ops::Pointwise::kAbs:
    case ops::Pointwise::kAdd:
    case ops::Pointwise::kSub:
    case ops::Pointwise::kMax:
    case ops::Pointwise::kMin: return true;
    default: return false;
  }
}

}  // namespace

// Whether one quick operation makes the value of inputs that stay in registers, or of numbers of
// the row, so that it need not stay there as well.
bool Body::is_made_quickly(const Value& value, const std::vector<bool>& kept) const {
  if (value.kind == Value::Kind::kScatter) return true;
  if (value.kind != Value::Kind::kPointwise || !is_quick(value.op)) return false;
  return std::all_of(value.operands.begin(), value.operands.end(), [&](int operand) {
    const Value& from = values[operand];
    return from.space != Space::kFull || (from.kind == Value::Kind::kInput && kept[operand]);
  });
}

Body make_body(const region::BoundSchedule& bound, bool round_short_floats) {
  return Maker(bound, round_short_floats).run();
}

}  // namespace torch_ort::cuda
