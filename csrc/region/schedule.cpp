#include "region/schedule.h"

#include "base/error.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "region/rounded.h"
#include "region/spaces.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torch_ort::region {

namespace {

using ir::Node;
using ir::Value;
using Axes = Schedule::Axes;
using Kind = ops::FusedForm::Kind;
using ops::Pointwise;
using Step = Schedule::Step;

// The space of a point-wise result whose operands are in these spaces.
Space join(Space a, Space b) {
  if (a == b || b == Space::kScalar) return a;
  return a == Space::kScalar ? b : Space::kFull;
}

Axes axes_of(const Node& node) {
  const auto rank = static_cast<int64_t>(node.inputs[0]->type.shape->size());
  const std::vector<int64_t> axes = *ops::reduction_axes(node);
  const auto count = static_cast<int64_t>(axes.size());
  if (count == rank) return Axes::kAll;
  return axes.front() == rank - count ? Axes::kColumns : Axes::kRows;
}

class Scheduler {
 public:
  explicit Scheduler(const Node& region) {
    schedule_.spec = read(region);
    const std::vector<Member> members = members_of(schedule_.spec);
    for (const Member& member : members) check_operands(member);
    spaces_ = find_spaces(schedule_.spec, members);
    schedule_.groups = spaces_.groups;
    note_inputs();
    rounded_ = rounded_values(members);
    for (const Member& member : members) add_step(member);
  }

  Schedule run() {
    find_overwritable();
    return std::move(schedule_);
  }

 private:
  // Where a value comes from.
  struct Source {
    Space space = Space::kScalar;
    int known_in = 0;
    int input = -1;  // the input that it is, directly or through kPass nodes; -1: none
    int step = -1;   // the step that computes it; -1: none
  };

  // Throws if an operand is missing. Axes and shapes are optional.
  static void check_operands(const Member& member) {
    ops::check_inputs(*member.node);
    const bool has_one = member.form.is_reduction() || member.form.kind == Kind::kPass;
    const size_t count = has_one ? 1 : member.node->inputs.size();
    for (size_t i = 0; i < count; ++i) ops::input(*member.node, i);
  }

  void note_inputs() {
    const RegionSpec& spec = schedule_.spec;
    const std::vector<Value*>& inputs = spec.body->inputs;
    schedule_.stretched.resize(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      sources_[inputs[i]] = {.space = spec.spaces[i], .input = static_cast<int>(i)};
    }
    for (const Operand& operand : spaces_.operands) {
      const auto found = sources_.find(operand.value);
      if (found == sources_.end()) continue;
      schedule_.stretched[found->second.input] = {operand.shape, operand.num_column_dims};
    }
  }

  // A constant, or a number that sizes determine, has no entry: it is a scalar from the start.
  Source source(const Value* value) const {
    const auto found = sources_.find(value);
    return found == sources_.end() ? Source() : found->second;
  }

  void add_step(const Member& member) {
    const Node& node = *member.node;
    Step step{.node = &node, .form = member.form, .space = spaces_.made.at(node.outputs[0])};
    std::vector<Source> operands;
    for (const Value* value : node.inputs) operands.push_back(source(value));
    for (const Source& operand : operands) step.phase = std::max(step.phase, operand.known_in);
    if (step.form.kind == Kind::kPointwise || step.form.kind == Kind::kPass) {
      step.space = Space::kScalar;
      for (const Source& operand : operands) step.space = join(step.space, operand.space);
    }
    if (step.form.is_reduction()) {
      step.axes = axes_of(node);
      const auto made = spaces_.made.find(node.inputs[0]);
      step.reduced = made != spaces_.made.end() ? made->second : operands[0].space;
    }
    const bool ends_phase = step.axes == Axes::kColumns || step.form.kind == Kind::kPick;
    step.known_in = step.phase + (ends_phase ? 1 : 0);
    step.is_remade = is_remade(step, operands);
    step.is_rounded = rounded_.contains(node.outputs[0]);

    Source made{.space = step.space, .known_in = step.known_in};
    if (step.form.kind == Kind::kPass) {
      made = operands[0];
    } else {
      made.step = static_cast<int>(schedule_.steps.size());
    }
    sources_[node.outputs[0]] = made;
    schedule_.steps.push_back(std::move(step));
  }

  static bool is_remade(const Step& step, const std::vector<Source>& operands) {
    const Pointwise op = step.form.op;
    if (step.form.kind != Kind::kPointwise || step.space != Space::kFull) return false;
    if (op != Pointwise::kAdd && op != Pointwise::kSub && op != Pointwise::kMul) return false;
    const auto is_full = [](const Source& each) { return each.space == Space::kFull; };
    const auto is_made = [](const Source& each) { return each.input < 0; };
    return std::count_if(operands.begin(), operands.end(), is_full) == 1 &&
           !is_made(*std::find_if(operands.begin(), operands.end(), is_full));
  }

  // ---- which inputs may be overwritten

  // When something happens: the phase, and the step in it. Sums over rows and copies to outputs
  // come last in their phase.
  using Time = std::pair<int, int>;
  static constexpr int kLast = std::numeric_limits<int>::max();

  // Notes that `from` is read at this time. If a later phase recomputes it, that reads its inputs.
  void note_read(const Source& from, Time time) {
    if (from.input >= 0) {
      last_reads_[from.input] = std::max(last_reads_[from.input], time);
    } else if (from.step >= 0 && schedule_.steps[from.step].is_remade) {
      const Step& made = schedule_.steps[from.step];
      if (time.first <= made.phase) return;
      for (const Value* value : made.node->inputs) note_read(source(value), time);
    }
  }

  void find_overwritable() {
    last_reads_.assign(schedule_.spec.body->inputs.size(), {-1, -1});
    for (size_t at = 0; at < schedule_.steps.size(); ++at) {
      const Step& step = schedule_.steps[at];
      if (step.form.kind == Kind::kPass) continue;
      for (const Value* value : step.node->inputs) {
        const Source from = source(value);
        if (step.form.kind == Kind::kConcat) {
          note_read(from, {from.known_in, kLast});
        } else {
          note_read(from, {step.phase, is_sum_of_rows(step) ? kLast : static_cast<int>(at)});
        }
      }
    }
    for (const Value* output : schedule_.spec.body->outputs) {
      const Source from = source(output);
      if (from.input >= 0) note_read(from, {0, kLast});
    }
    const std::optional<Time> written = first_written();
    if (!written) return;
    for (size_t i = 0; i < last_reads_.size(); ++i) {
      if (schedule_.spec.spaces[i] != Space::kFull || last_reads_[i] > *written) continue;
      schedule_.overwritable.push_back(static_cast<int>(i));
    }
  }

  // When the first output is written; nothing if that is not element by element in one step.
  std::optional<Time> first_written() const {
    const Source first = source(schedule_.spec.body->outputs.at(0));
    if (first.step < 0) return std::nullopt;
    const Step& step = schedule_.steps[first.step];
    // Sums over rows are written when all rows have been read.
    if (is_sum_of_rows(step)) return Time{kLast, kLast};
    if (step.space != Space::kFull) return std::nullopt;
    return Time{step.phase, first.step};
  }

  static bool is_sum_of_rows(const Step& step) {
    return step.axes == Axes::kAll || step.axes == Axes::kRows;
  }

  Schedule schedule_;
  Spaces spaces_;
  std::unordered_set<const Value*> rounded_;
  std::unordered_map<const Value*, Source> sources_;
  std::vector<Time> last_reads_;  // by input
};

// Checks that the inputs of a body have the types of what its node reads.
void check_operands(const Node& region, const ir::Graph& body) {
  const auto text = [](const ir::Type& type) {
    return concat(ir::name(type.dtype), type.shape ? ir::to_string(*type.shape) : " of no rank");
  };
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    const ir::Type &got = body.inputs[i]->type, &want = ops::input(region, i).type;
    ORT_CHECK(got.dtype == want.dtype && got.shape == want.shape, "input ", i, " of its body: got ",
              text(got), ", want ", text(want), " as the node reads");
  }
}

// Calls `report` with the error of each region that has one.
template <typename Report>
void for_each_fault(const ir::Graph& graph, const Report& report) {
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (!ir::is(&node, "Region", ir::kTorchOrtDomain)) {
      for (const auto& body : ir::bodies(node)) for_each_fault(*body, report);
      continue;
    }
    const auto report_error = [&](const std::exception& error) {
      report(concat("node '", node.name, "': ", error.what()));
    };
    try {
      check_operands(node, *make_schedule(node).spec.body);
    } catch (const InternalError& error) {
      report_error(error);
    } catch (const Unsupported& error) {
      report_error(error);
    }
  }
}

}  // namespace

Schedule make_schedule(const Node& region) { return Scheduler(region).run(); }

void verify(const ir::Graph& graph, std::string_view stage) {
  for_each_fault(graph, [&](const std::string& fault) {
    throw InternalError(concat("verify ", stage, ": ", fault));
  });
}

void check_file(const ir::Graph& graph) {
  for_each_fault(graph, [](const std::string& fault) { throw UserError(concat("file: ", fault)); });
}

}  // namespace torch_ort::region
