#include "passes/row_sparsity.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/linear_loss.h"
#include "ops/op.h"
#include "ops/product.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/budget.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/known_sizes.h"
#include "region/codegen.h"
#include "region/contract.h"
#include "region/schedule.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes {

bool RowSet::contains(const RowSet& other) const {
  if (is_all_ || other.is_none()) return true;
  return !other.is_all_ && (other.atoms_ & ~atoms_) == 0 && (is_closed_ || !other.is_closed_);
}

RowSet unite(const RowSet& a, const RowSet& b) {
  if (a.is_all_ || b.is_all_) return RowSet::all();
  return RowSet(false, a.atoms_ | b.atoms_, a.is_closed_ || b.is_closed_);
}

RowSet intersect(const RowSet& a, const RowSet& b) { return b.contains(a) ? a : b; }

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;
using ops::Pointwise;
using Kind = ops::FusedForm::Kind;
using region::Space;

// The rows that lists select from: all positions of all sequences.
struct RowSpace {
  Dim sequences = 1, length = 1;
  Dim num_rows() const { return ops::times(sequences, length); }
};

// Which dims of a value are those of rows: one dim for sequence and position together, or two dims.
struct Form {
  // -1: the value has no rows.
  int sequence = -1, place = -1;
  bool is_there() const { return sequence >= 0; }
  bool is_joint() const { return sequence == place; }
  // Whether the first dims are those of rows.
  bool is_leading() const { return sequence == 0 && (place == 0 || place == 1); }
  bool operator==(const Form& other) const = default;
};

struct Facts {
  Form form;
  RowSet nonzero = RowSet::all(), needed = RowSet::none();
};

// A condition that selects rows: a label that is not the ignored one, a key that a mask shows, or
// one position of each sequence.
struct Atom {
  enum class Kind : uint8_t { kLabels, kMask, kPlace } kind = Kind::kPlace;
  Value* source = nullptr;
  int64_t ignored = 0, place = 0;
  bool is_causal = false;
  bool operator==(const Atom& other) const = default;
};

constexpr size_t kMostAtoms = 64;

bool is_ours(const Node& node, std::string_view name) {
  return ir::is(&node, name, ir::kTorchOrtDomain);
}

// The value of a body that nodes pass on unchanged as `value`.
Value* passed_on(Value* value) {
  while (value->producer != nullptr && ops::fused_form(*value->producer).kind == Kind::kPass) {
    value = value->producer->inputs[0];
  }
  return value;
}

// The input that a node gives on element by element as one of its results; nullptr if there is
// none.
Value* given_on(const Value& result) {
  const Node* node = result.producer;
  if (node == nullptr || node->inputs.empty()) return nullptr;
  if (ir::is(node, "Reshape") || ir::is(node, "Identity") || ir::is(node, "Unsqueeze") ||
      ir::is(node, "Squeeze")) {
    return node->inputs[0];
  }
  if (!is_ours(*node, "Region")) return nullptr;
  // A region that computes a loss may also copy the labels. Such a copy selects the same rows as
  // the labels themselves.
  const Graph& body = ops::region_body(*node);
  const auto& inputs = body.inputs;
  const auto found = std::find(inputs.begin(), inputs.end(), passed_on(body.outputs[result.index]));
  if (found == inputs.end() || (*found)->type.dtype != result.type.dtype) return nullptr;
  return node->inputs[found - inputs.begin()];
}

// The value that has the same elements in the same order and is computed by more than passing on.
Value* root_of(Value* value) {
  while (Value* given = given_on(*value)) value = given;
  return value;
}

std::optional<int64_t> constant_int(const Dim& dim) {
  return dim.is_constant() ? std::optional(dim.constant()) : std::nullopt;
}

// ---- pointwise operations

// Whether the result is zero where the first operand is zero, whatever the other operands are.
bool is_zero_where_first_is(Pointwise op) {
  switch (op) {
    case Pointwise::kCopy:
    case Pointwise::kNeg:
    case Pointwise::kAbs:
    case Pointwise::kSqrt:
    case Pointwise::kTanh:
    case Pointwise::kErf:
    case Pointwise::kRelu:
    case Pointwise::kFloor:
    case Pointwise::kCeil:
    case Pointwise::kRound:
    case Pointwise::kTrunc:
    case Pointwise::kSign:
    case Pointwise::kSin:
    case Pointwise::kToBool:
    case Pointwise::kToBFloat16:
    case Pointwise::kToHalf:
    case Pointwise::kGelu:
    case Pointwise::kGeluTanh:
    case Pointwise::kSilu:
    case Pointwise::kDiv:
    case Pointwise::kGeluGrad:
    case Pointwise::kGeluTanhGrad:
    case Pointwise::kSiluGrad:
    case Pointwise::kTanhGrad:
    case Pointwise::kSigmoidGrad:
    case Pointwise::kThresholdGrad:
    case Pointwise::kLeakyReluGrad: return true;
    default: return false;
  }
}

// The nonzero rows of the result of an operation, from those of its operands. Constants of the
// operation count as nonzero.
RowSet nonzero_of(Pointwise op, const std::vector<RowSet>& operands, bool has_constants) {
  const auto operand = [&](size_t i) { return i < operands.size() ? operands[i] : RowSet::all(); };
  if (is_zero_where_first_is(op)) return operand(0);
  switch (op) {
    case Pointwise::kMul:
    case Pointwise::kAnd: return intersect(operand(0), operand(1));
    case Pointwise::kAdd:
    case Pointwise::kSub:
    case Pointwise::kOr: return has_constants ? RowSet::all() : unite(operand(0), operand(1));
    case Pointwise::kMulAdd:
    case Pointwise::kWhere:
      return has_constants ? RowSet::all() : unite(intersect(operand(0), operand(1)), operand(2));
    default: return RowSet::all();
  }
}

// ---- the analysis

class Analysis {
 public:
  Analysis(Graph& graph, RowSpace space, RowSources sources)
      : graph_(graph), space_(std::move(space)), sources_(sources) {}

  void run() {
    bool is_backward = false;
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      nodes_.push_back(&node);
      is_backward = is_backward || ir::is(&node, "YieldOp", ir::kMicrosoftDomain);
      if (is_backward) backward_.insert(&node);
    }
    for (Node* node : nodes_) find_nonzero(*node);
    if (atoms_.empty()) return;
    if (!find_early()) {
      atoms_.clear();
      return;
    }
    for (Value* output : graph_.outputs) need(output, RowSet::all());
    for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) find_needed(**node);
  }

  bool has_atoms() const { return !atoms_.empty(); }
  const std::vector<Atom>& atoms() const { return atoms_; }
  const RowSpace& space() const { return space_; }
  const std::vector<Node*>& nodes() const { return nodes_; }
  bool is_early(const Node* node) const { return early_.contains(node); }
  bool is_backward(const Node* node) const { return backward_.contains(node); }
  const Facts& facts(const Value* value) { return facts_[value]; }

  // What a node has to compute: rows of queries, of a region or of a product; and rows of keys.
  struct Work {
    RowSet rows = RowSet::all(), keys = RowSet::all();
    // Set for a product that sums over the rows.
    bool sums = false;
  };
  // nullptr: the node computes all of its rows.
  const Work* work(const Node* node) const {
    const auto found = work_.find(node);
    return found == work_.end() ? nullptr : &found->second;
  }
  Work work_or_all(const Node* node) const {
    const Work* found = work(node);
    return found == nullptr ? Work() : *found;
  }
  // Whether a reader of the value reads rows that are zero and that nobody computes.
  bool is_zeroed(const Value* value) const { return zeroed_.contains(value); }

  // The rows that a node `Rows` lists.
  RowSet set_of(const Node& rows) {
    if (ir::int_attr(rows.attrs, "is_all", 0) != 0) return RowSet::all();
    RowSet set = RowSet::none();
    for (const Dim& place : ir::ints_attr(rows.attrs, "places", {})) {
      set = unite(set, atom({.kind = Atom::Kind::kPlace, .place = place.constant()}));
    }
    const auto kinds = ir::strings_attr(rows.attrs, "kinds", {});
    const Shape ignored = ir::ints_attr(rows.attrs, "ignored", {});
    const Shape causal = ir::ints_attr(rows.attrs, "is_causal", {});
    for (size_t i = 0; i < kinds.size(); ++i) {
      set = unite(set, atom({.kind = kinds[i] == "mask" ? Atom::Kind::kMask : Atom::Kind::kLabels,
                             .source = rows.inputs.at(i),
                             .ignored = ignored.at(i).constant(),
                             .is_causal = causal.at(i).constant() != 0}));
    }
    return ir::int_attr(rows.attrs, "is_closed", 0) != 0 ? set.closed() : set;
  }

 private:
  // ---- where the rows are

  Form leading(const Value* value) const {
    if (!value->type.shape) return {};
    const Shape& shape = *value->type.shape;
    if (shape.size() >= 2 && shape[0] == space_.sequences && shape[1] == space_.length) {
      return {0, 1};
    }
    if (!shape.empty() && shape[0] == space_.num_rows()) return {0, 0};
    return {};
  }

  // Whether the elements of the value are one for each row, in order.
  bool is_all_rows(const Value* value) const {
    return value->type.shape && ir::numel(*value->type.shape) == space_.num_rows();
  }

  Facts& of(const Value* value) {
    const auto [found, is_new] = facts_.try_emplace(value);
    if (is_new && value->producer == nullptr) found->second.form = leading(value);
    return found->second;
  }

  void set(const Value* value, Form form, RowSet nonzero) {
    if (value == nullptr) return;
    Facts& facts = of(value);
    facts.form = form;
    facts.nonzero = nonzero;
  }

  void need(const Value* value, const RowSet& rows) {
    if (value == nullptr) return;
    Facts& facts = of(value);
    if (!facts.form.is_there()) {
      facts.needed = RowSet::all();
      return;
    }
    // A reader may want more rows than the nonzero ones. Then the others are written as zeros.
    const bool wants_zeros = facts.form.is_leading() && !facts.nonzero.contains(rows) &&
                             value->producer != nullptr && !is_early(value->producer);
    if (wants_zeros) zeroed_.insert(value);
    facts.needed = unite(facts.needed, wants_zeros ? facts.nonzero : rows);
  }

  bool may_tell(Atom::Kind kind) const {
    switch (kind) {
      case Atom::Kind::kLabels: return sources_.labels;
      case Atom::Kind::kMask: return sources_.padding;
      case Atom::Kind::kPlace: break;
    }
    return true;
  }

  RowSet atom(const Atom& atom) {
    if (!may_tell(atom.kind)) return RowSet::all();
    auto found = std::find(atoms_.begin(), atoms_.end(), atom);
    if (found == atoms_.end()) {
      if (atoms_.size() == kMostAtoms) return RowSet::all();
      if (atom.source != nullptr && backward_.contains(atom.source->producer)) {
        return RowSet::all();
      }
      found = atoms_.insert(found, atom);
    }
    return RowSet::atom(static_cast<int>(found - atoms_.begin()));
  }

  // ---- nonzero rows, from the inputs to the outputs

  void find_nonzero(Node& node) {
    if (is_ours(node, "Region")) return nonzero_of_region(node);
    if (is_ours(node, "Attention")) return nonzero_of_attention(node);
    if (is_ours(node, "AttentionGrad")) return nonzero_of_attention_grad(node);
    if (is_product(node)) return nonzero_of_product(node);
    if (is_ours(node, "LinearCrossEntropy")) return nonzero_of_linear_loss(node);
    if (is_select_backward(node)) return nonzero_of_select_backward(node);
    if (const std::optional<Form> form = form_of_view(node)) {
      RowSet nonzero = RowSet::none();
      for (size_t i = 0; i < num_viewed(node); ++i) {
        nonzero = unite(nonzero, of(node.inputs[i]).nonzero);
      }
      for (const Value* output : node.outputs) set(output, *form, nonzero);
      return;
    }
    if (const Form form = form_of_pointwise(node); form.is_there()) {
      const ops::FusedForm fused = ops::fused_form(node);
      std::vector<RowSet> operands;
      for (const Value* input : node.inputs) {
        operands.push_back(has_all_of(input, node.outputs[0], form) ? of(input).nonzero
                                                                    : RowSet::all());
      }
      set(node.outputs[0], form, nonzero_of(fused.op, operands, !fused.constants.empty()));
    }
  }

  // Whether the operand has the shape of the result, with rows in the same dims.
  bool has_all_of(const Value* operand, const Value* result, Form form) {
    return operand != nullptr && operand->type.shape == result->type.shape &&
           of(operand).form == form;
  }

  // The form of the result of a point-wise node; none if no operand has rows.
  Form form_of_pointwise(const Node& node) {
    if (node.outputs.size() != 1 || node.outputs[0] == nullptr || !node.outputs[0]->type.shape ||
        ops::fused_form(node).kind != Kind::kPointwise) {
      return {};
    }
    for (const Value* input : node.inputs) {
      if (input == nullptr) continue;
      const Form form = of(input).form;
      if (form.is_there() && has_all_of(input, node.outputs[0], form)) return form;
    }
    return {};
  }

  static size_t num_viewed(const Node& node) {
    return ir::is(&node, "Concat") ? node.inputs.size() : 1;
  }

  // The form of the result of a node that moves elements but keeps rows together; nothing for other
  // nodes.
  std::optional<Form> form_of_view(const Node& node) {
    if (node.inputs.empty() || node.inputs[0] == nullptr) return {};
    if (node.outputs.size() != 1 && !ir::is(&node, "Split")) return {};
    const Value *x = node.inputs[0], *result = node.outputs[0];
    const Form form = of(x).form;
    if (!form.is_there() || !x->type.shape || !result->type.shape) return {};
    const auto rank = static_cast<int64_t>(x->type.shape->size());
    if (ir::is(&node, "Identity") || is_ours(node, "ZeroRows")) return form;
    if (ir::is(&node, "Reshape")) {
      if (*x->type.shape == *result->type.shape) return form;
      const Form made = leading(result);
      if (form.is_leading() && made.is_there()) return made;
      return form_in(*x->type.shape, form, *result->type.shape);
    }
    if (ir::is(&node, "Expand") || ir::is(&node, "Slice") || ir::is(&node, "Split")) {
      return keeps_row_dims(node, form) ? std::optional(form) : std::nullopt;
    }
    if (ir::is(&node, "ReduceSum")) return form_of_sum(node, form);
    if (ir::is(&node, "Transpose")) {
      const Shape order = ir::ints_attr(node.attrs, "perm", {});
      if (static_cast<int64_t>(order.size()) != rank) return {};
      Form made;
      for (size_t i = 0; i < order.size(); ++i) {
        if (order[i].constant() == form.sequence) made.sequence = static_cast<int>(i);
        if (order[i].constant() == form.place) made.place = static_cast<int>(i);
      }
      return made;
    }
    if (ir::is(&node, "Gather")) {
      const int64_t axis = axis_of(node, rank);
      if (!node.inputs[1]->type.shape || !node.inputs[1]->type.shape->empty() ||
          is_row_dim(form, axis)) {
        return {};
      }
      return without(form, axis);
    }
    if (ir::is(&node, "Unsqueeze") || ir::is(&node, "Squeeze")) return form_with_ones(node, form);
    if (ir::is(&node, "Concat")) {
      if (is_row_dim(form, axis_of(node, rank))) return {};
      for (const Value* part : node.inputs) {
        if (!(of(part).form == form)) return {};
      }
      return form;
    }
    return {};
  }

  // The dims of the rows after a reshape from `shape` to `other`.
  static std::optional<Form> form_in(const Shape& shape, Form form, const Shape& other) {
    const auto find = [&](int dim) {
      Dim before = 1;
      for (int i = 0; i < dim; ++i) before = ops::times(before, shape[static_cast<size_t>(i)]);
      Dim here = 1;
      for (size_t i = 0; i < other.size(); here = ops::times(here, other[i++])) {
        if (here == before && other[i] == shape[static_cast<size_t>(dim)])
          return static_cast<int>(i);
      }
      return -1;
    };
    const Form made{find(form.sequence), find(form.place)};
    const bool is_found = made.sequence >= 0 && made.place >= 0;
    return is_found && made.is_joint() == form.is_joint() ? std::optional(made) : std::nullopt;
  }

  // Whether a node that takes parts of some dims, or repeats along them, leaves the dims of the
  // rows as they are.
  bool keeps_row_dims(const Node& node, Form form) {
    const Shape &from = *node.inputs[0]->type.shape, &to = *node.outputs[0]->type.shape;
    if (from.size() != to.size()) return false;
    const auto rank = static_cast<int64_t>(from.size());
    if (ir::is(&node, "Split") && is_row_dim(form, axis_of(node, rank))) return false;
    // A slice with step 1 that keeps the size of a dim takes all of it.
    const bool has_steps = node.inputs.size() > 4 && node.inputs[4] != nullptr;
    if (ir::is(&node, "Slice") && has_steps) {
      if (node.inputs[3] == nullptr || !ops::has_known_ints(node.inputs[3])) return false;
      for (const Dim& axis : ops::known_ints(node.inputs[3])) {
        const int64_t dim = axis.constant();
        if (is_row_dim(form, dim < 0 ? dim + rank : dim)) return false;
      }
    }
    const auto same = [&](int dim) {
      return from[static_cast<size_t>(dim)] == to[static_cast<size_t>(dim)];
    };
    return same(form.sequence) && same(form.place);
  }

  // The form of a sum over dims that are not those of rows.
  static std::optional<Form> form_of_sum(const Node& node, Form form) {
    const auto axes = ops::reduction_axes(node);
    if (!axes || ops::fused_form(node).kind != Kind::kSum) return std::nullopt;
    const bool keeps = ir::int_attr(node.attrs, "keepdims", 1) != 0;
    for (auto axis = axes->rbegin(); axis != axes->rend(); ++axis) {
      if (is_row_dim(form, *axis)) return std::nullopt;
      if (!keeps) form = without(form, *axis);
    }
    return form;
  }

  static int64_t axis_of(const Node& node, int64_t rank) {
    const int64_t axis = ir::int_attr(node.attrs, "axis", 0);
    return axis < 0 ? axis + rank : axis;
  }
  static bool is_row_dim(const Form& form, int64_t axis) {
    return axis == form.sequence || axis == form.place;
  }
  static Form without(Form form, int64_t axis) {
    return {form.sequence - (axis < form.sequence ? 1 : 0),
            form.place - (axis < form.place ? 1 : 0)};
  }

  std::optional<Form> form_with_ones(const Node& node, Form form) {
    if (node.inputs.size() != 2 || !ops::has_known_ints(node.inputs[1])) return {};
    const bool removes = ir::is(&node, "Squeeze");
    const auto rank =
        static_cast<int64_t>((removes ? node.inputs[0] : node.outputs[0])->type.shape->size());
    std::vector<int64_t> axes;
    for (const Dim& axis : ops::known_ints(node.inputs[1])) {
      axes.push_back(axis.constant() < 0 ? axis.constant() + rank : axis.constant());
    }
    std::sort(axes.begin(), axes.end());
    if (removes) std::reverse(axes.begin(), axes.end());
    for (int64_t axis : axes) {
      if (removes && is_row_dim(form, axis)) return {};
      if (removes) {
        form = without(form, axis);
      } else {
        form.sequence += axis <= form.sequence ? 1 : 0;
        form.place += axis <= form.place ? 1 : 0;
      }
    }
    return form;
  }

  // ---- regions

  struct Region {
    region::Schedule schedule;
    bool takes_list = false;
    // Set where each row of the results depends only on the same row of the operands, although the
    // region has other rows than the model: those of each head, after a transpose.
    bool follows = false;
    std::vector<bool> has_rows;         // by operand
    std::vector<bool> is_total;         // by output: whether it sums over rows
    RowSet of_totals = RowSet::none();  // the rows that these sums add
  };

  void nonzero_of_region(Node& node) {
    Region found{region::make_schedule(node)};
    const region::RegionSpec& spec = found.schedule.spec;
    found.takes_list = spec.rows == space_.num_rows() && found.schedule.groups == Dim(1) &&
                       region::has_kernel(node.outputs[0], "Rows");
    // If all queries share one head of keys, this has as many rows as the model, but with the dims
    // of heads.
    const auto has_heads = [this](const Value* value) {
      return of(value).form.is_there() && !of(value).form.is_leading();
    };
    Form form;
    if (!found.takes_list || std::any_of(node.inputs.begin(), node.inputs.end(), has_heads)) {
      form = followed_form(node, found.schedule);
    }
    found.follows = form.is_there();
    found.takes_list = found.takes_list && !found.follows;
    for (size_t i = 0; i < spec.spaces.size(); ++i) {
      const Form& of_operand = of(node.inputs[i]).form;
      const bool lies = found.takes_list ? of_operand.is_leading() : of_operand == form;
      found.has_rows.push_back(lies && is_by_rows(found.schedule, i) && of_operand.is_there());
    }
    std::unordered_map<const Value*, RowSet> inner;
    std::unordered_set<const Value*> totals;
    if (found.takes_list || found.follows) {
      for (size_t i = 0; i < spec.body->inputs.size(); ++i) {
        inner.emplace(spec.body->inputs[i],
                      found.has_rows[i] ? of(node.inputs[i]).nonzero : RowSet::all());
      }
      for (const region::Schedule::Step& step : found.schedule.steps) {
        if (step.form.kind == Kind::kConcat) found.takes_list = false;
        inner.emplace(step.node->outputs[0], nonzero_of_step(node, found.schedule, step, inner));
        if (adds_rows(step)) {
          totals.insert(step.node->outputs[0]);
          const auto added = inner.find(step.node->inputs[0]);
          found.of_totals =
              unite(found.of_totals, added == inner.end() ? RowSet::all() : added->second);
        }
      }
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const auto nonzero = inner.find(spec.body->outputs[i]);
      const bool is_total = totals.contains(passed_on(spec.body->outputs[i]));
      const bool has_rows = (found.takes_list || found.follows) && !is_total;
      found.is_total.push_back(is_total);
      set(node.outputs[i],
          !has_rows          ? Form()
          : found.takes_list ? leading(node.outputs[i])
                             : form,
          nonzero == inner.end() || !has_rows ? RowSet::all() : nonzero->second);
    }
    regions_.emplace(&node, std::move(found));
  }

  static bool adds_rows(const region::Schedule::Step& step) {
    return step.axes == region::Schedule::Axes::kAll || step.axes == region::Schedule::Axes::kRows;
  }

  // Whether the region reads this operand row by row.
  static bool is_by_rows(const region::Schedule& schedule, size_t operand) {
    const Space space = schedule.spec.spaces[operand];
    return schedule.stretched[operand].shape.empty() &&
           (space == Space::kFull || space == Space::kRow);
  }

  // The form that the results of a region share with its operands; none if they do not.
  Form followed_form(const Node& node, const region::Schedule& schedule) {
    bool joins = false, reduces = false;
    for (const region::Schedule::Step& step : schedule.steps) {
      if (adds_rows(step) || step.form.has_label()) return {};
      joins = joins || step.form.kind == Kind::kConcat;
      reduces = reduces || step.form.is_reduction() || step.form.kind == Kind::kGather;
    }
    for (size_t i = 0; i < schedule.spec.spaces.size(); ++i) {
      const Value* operand = node.inputs[i];
      const Form form = of(operand).form;
      if (!form.is_there() || !is_by_rows(schedule, i)) continue;
      const Shape& shape = *operand->type.shape;
      const size_t rows = reduces ? leading_dims(shape, schedule.spec.rows) : shape.size();
      if (rows <= static_cast<size_t>(std::max(form.sequence, form.place))) return {};
      const auto fits = [&](const Value* value) {
        const Shape& other = *value->type.shape;
        if (reduces ? other.size() < rows : other.size() != rows) return false;
        for (size_t dim = 0; dim < rows; ++dim) {
          const bool may_differ = joins && !reduces && !is_row_dim(form, static_cast<int64_t>(dim));
          if (!may_differ && !(other[dim] == shape[dim])) return false;
        }
        return true;
      };
      const auto is_other = [&](const Value* value) { return !(of(value).form == form); };
      const bool is_form = std::all_of(node.outputs.begin(), node.outputs.end(), fits) &&
                           std::all_of(node.inputs.begin(), node.inputs.end(),
                                       [&](auto* value) { return is_other(value) || fits(value); });
      return is_form ? form : Form();
    }
    return {};
  }

  // The number of leading dims whose product is the number of rows; 0 if there is none.
  static size_t leading_dims(const Shape& shape, const Dim& rows) {
    Dim product = 1;
    for (size_t count = 0; count < shape.size();) {
      product = ops::times(product, shape[count++]);
      if (product == rows) return count;
    }
    return 0;
  }

  RowSet nonzero_of_step(const Node& node, const region::Schedule& schedule,
                         const region::Schedule::Step& step,
                         const std::unordered_map<const Value*, RowSet>& inner) {
    std::vector<RowSet> operands;
    for (const Value* value : step.node->inputs) {
      const auto found = inner.find(value);
      if (found != inner.end()) {
        operands.push_back(found->second);
      } else {
        const bool is_zero = value != nullptr && ops::known_double(value) == 0.0;
        operands.push_back(is_zero ? RowSet::none() : RowSet::all());
      }
    }
    switch (step.form.kind) {
      case Kind::kPass:
      case Kind::kSum:
      case Kind::kMean:
      case Kind::kMax:
      case Kind::kMin: return operands[0];
      case Kind::kPointwise:
        return nonzero_of(step.form.op, operands, !step.form.constants.empty());
      case Kind::kConcat: {
        RowSet all = RowSet::none();
        for (const RowSet& operand : operands) all = unite(all, operand);
        return all;
      }
      case Kind::kPick: return intersect(labels(node, schedule, *step.node, 1), operands[0]);
      case Kind::kScatter: return intersect(labels(node, schedule, *step.node, 0), operands[1]);
      case Kind::kValid: return labels(node, schedule, *step.node, 0);
      default: return RowSet::all();
    }
  }

  // The rows whose label, which a node of the body reads, is not the ignored one.
  RowSet labels(const Node& node, const region::Schedule& schedule, const Node& reader,
                size_t slot) {
    if (!ir::has_attr(reader.attrs, "ignore_index")) return RowSet::all();
    const auto& inputs = schedule.spec.body->inputs;
    const auto found = std::find(inputs.begin(), inputs.end(), passed_on(reader.inputs[slot]));
    if (found == inputs.end()) return RowSet::all();
    Value* labels = root_of(node.inputs[found - inputs.begin()]);
    const ir::DType dtype = labels->type.dtype;
    if ((dtype != ir::DType::kInt64 && dtype != ir::DType::kInt32) || !is_all_rows(labels)) {
      return RowSet::all();
    }
    return atom({.kind = Atom::Kind::kLabels,
                 .source = labels,
                 .ignored = ir::int_attr(reader.attrs, "ignore_index", 0)});
  }

  void needed_of_region(Node& node) {
    const Region& region = regions_.at(&node);
    RowSet rows = region.takes_list ? region.of_totals : RowSet::none();
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i]->uses.empty() || region.is_total[i]) continue;
      const Facts& facts = of(node.outputs[i]);
      // A region with a list writes zeros to the other rows itself. Without a list it computes
      // zeros from the zeros of its operands.
      const RowSet wanted =
          region.takes_list ? intersect(facts.needed, facts.nonzero) : facts.needed;
      rows = unite(rows, facts.form.is_there() ? wanted : RowSet::all());
    }
    if (is_early(&node) || !(region.takes_list || region.follows)) rows = RowSet::all();
    if (region.takes_list && !rows.is_all()) work_[&node] = {.rows = rows};
    for (size_t i = 0; i < region.has_rows.size(); ++i) {
      // Ids are read in all rows, because eager PyTorch raises an error for a bad id in any row.
      need(node.inputs[i], region.has_rows[i] ? rows : RowSet::all());
    }
  }

  // ---- products

  static bool is_product(const Node& node) {
    if (!ir::is(&node, "Gemm") && !ir::is(&node, "MatMul") && !is_ours(node, "RowsProduct")) {
      return false;
    }
    for (size_t i : {0, 1}) {
      const Value* factor = node.inputs.at(i);
      if (!factor->type.shape || factor->type.shape->size() != 2) return false;
    }
    for (const char* name : {"transA", "transB"}) {
      if (ir::int_attr(node.attrs, name, 0) != 0) return false;
    }
    for (const char* name : {"alpha", "beta"}) {
      if (ir::float_attr(node.attrs, name, 1) != 1) return false;
    }
    const ir::DType dtype = node.outputs[0]->type.dtype;
    const bool is_float = dtype == ir::DType::kFloat || dtype == ir::DType::kDouble ||
                          dtype == ir::DType::kBFloat16 || dtype == ir::DType::kHalf;
    return is_float && region::has_kernel(node.outputs[0], "Rows") &&
           dtype == node.inputs[0]->type.dtype && dtype == node.inputs[1]->type.dtype;
  }

  // Whether the tensor that the product is added to has one row for each row of the product.
  bool has_start_rows(const Node& node) {
    const Value* start = ops::start_of(node);
    return start != nullptr && start->type.shape && start->type.shape->size() == 2 &&
           of(start).form == Form{0, 0};
  }

  void nonzero_of_product(Node& node) {
    if (!(of(node.inputs[0]).form == Form{0, 0})) return;
    RowSet nonzero = of(node.inputs[0]).nonzero;
    if (ops::start_of(node) != nullptr) {
      nonzero =
          has_start_rows(node) ? unite(nonzero, of(ops::start_of(node)).nonzero) : RowSet::all();
    }
    set(node.outputs[0], {0, 0}, nonzero);
  }

  void needed_of_product(Node& node) {
    const Value *a = node.inputs[0], *b = node.inputs[1];
    if (of(a).form == Form{1, 1} && of(b).form == Form{0, 0}) {
      RowSet rows = intersect(of(a).nonzero, of(b).nonzero);
      if (is_early(&node)) rows = RowSet::all();
      if (!rows.is_all()) work_[&node] = {.rows = rows, .sums = true};
      need(a, rows);
      need(b, rows);
      need(ops::start_of(node), RowSet::all());
      return;
    }
    const bool has_rows = of(a).form == Form{0, 0};
    const Facts& result = of(node.outputs[0]);
    RowSet rows = has_rows ? intersect(result.needed, result.nonzero) : RowSet::all();
    if (is_early(&node)) rows = RowSet::all();
    if (!rows.is_all()) work_[&node] = {.rows = rows};
    need(a, rows);
    need(b, RowSet::all());
    need(ops::start_of(node), has_start_rows(node) ? rows : RowSet::all());
  }

  // ---- attention

  static constexpr Form kHeads = {0, 2};

  // Whether queries, keys and values have the same positions.
  bool is_self_attention(const Node& node, size_t query) {
    for (size_t i = query; i < query + 3; ++i) {
      if (!(of(node.inputs[i]).form == kHeads)) return false;
    }
    return true;
  }

  // The keys that queries in `rows` attend to.
  RowSet keys_of(const Node& node, size_t optional, const RowSet& queries) {
    const bool is_causal = ir::int_attr(node.attrs, "is_causal", 0) != 0;
    const bool drops = ir::has_attr(node.attrs, "keep");
    const size_t last = node.inputs.size() - (drops ? 1 : 0) - ops::row_list_inputs(node).size();
    RowSet keys = is_causal ? queries : RowSet::all();
    if (last <= optional || node.inputs[optional] == nullptr) return keys;
    Value* mask = node.inputs[optional];
    if (!mask->type.shape || mask->type.shape->empty() || mask->type.shape->size() > 4) return keys;
    const Shape& shape = *mask->type.shape;
    const bool is_wide = shape.back() == space_.length;
    const bool is_each = shape.size() == 4 && shape[0] == space_.sequences;
    const bool is_shared = shape.size() < 4 || shape[0] == Dim(1);
    if (!is_wide || (!is_each && !is_shared)) return keys;
    if (mask->type.dtype == ir::DType::kBool) {
      const double fill = ir::float_attr(node.attrs, "fill", 0);
      if (fill > std::numeric_limits<float>::lowest() / 2) return keys;
    }
    const RowSet shown =
        atom({.kind = Atom::Kind::kMask, .source = mask, .is_causal = is_causal}).closed();
    return intersect(shown, keys);
  }

  void nonzero_of_attention(Node& node) {
    if (!is_self_attention(node, 0)) return;
    // This notes the rows that the mask selects.
    keys_of(node, 3, RowSet::all());
    for (const Value* output : node.outputs) set(output, kHeads, RowSet::all());
  }

  void nonzero_of_attention_grad(Node& node) {
    if (!is_self_attention(node, 1) || !(of(node.inputs[0]).form == kHeads)) return;
    const RowSet queries = of(node.inputs[0]).nonzero.closed();
    const RowSet keys = keys_of(node, 5, queries);
    set(node.outputs[0], kHeads, queries);
    set(node.outputs.at(1), kHeads, keys);
    set(node.outputs.at(2), kHeads, keys);
  }

  void needed_of_attention(Node& node) {
    const bool is_gradient = is_ours(node, "AttentionGrad");
    const size_t query = is_gradient ? 1 : 0;
    RowSet queries = RowSet::all(), keys = RowSet::all();
    const bool fits = is_self_attention(node, query) && !is_early(&node) &&
                      (!is_gradient || of(node.inputs[0]).form == kHeads);
    if (fits) {
      if (is_gradient) {
        queries = of(node.inputs[0]).nonzero.closed();
      } else {
        queries = RowSet::none();
        for (const Value* output : node.outputs) {
          if (output != nullptr) queries = unite(queries, of(output).needed);
        }
        queries = queries.closed();
      }
      keys = keys_of(node, is_gradient ? 5 : 3, queries);
      // Zeros are written only to values whose leading dims are those of rows.
      if (is_gradient) {
        queries = unite(queries, of(node.outputs[0]).needed).closed();
        for (size_t i : {1, 2}) keys = unite(keys, of(node.outputs[i]).needed).closed();
      }
    }
    const bool is_partial = !queries.is_all() || !keys.is_all();
    if (is_partial) work_[&node] = {.rows = queries, .keys = keys};
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (i == query + 1 || i == query + 2) {
        need(node.inputs[i], keys);
      } else {
        need(node.inputs[i], i < query + 3 || (is_gradient && i == 4) ? queries : RowSet::all());
      }
    }
  }

  // ---- other nodes

  // The rows whose label counts, for a loss that computes its logits itself.
  RowSet rows_of_linear_loss(const Node& node, const ops::LinearLoss& loss) {
    Value* labels = root_of(node.inputs.at(2));
    const bool is_known = labels->type.dtype == ir::DType::kInt64 && is_all_rows(labels);
    if (!is_known || loss.has_all_rows()) return RowSet::all();
    return atom({.kind = Atom::Kind::kLabels, .source = labels, .ignored = loss.ignore_index});
  }

  void nonzero_of_linear_loss(Node& node) {
    const ops::LinearLoss loss = ops::linear_loss(node);
    const RowSet rows = rows_of_linear_loss(node, loss);
    if (!loss.has_hidden_grad) return;
    const Value* gradient = node.outputs.at(loss.hidden_grad());
    set(gradient, leading(gradient), rows);
  }

  void needed_of_linear_loss(Node& node) {
    const ops::LinearLoss loss = ops::linear_loss(node);
    RowSet rows = RowSet::all();
    if (leading(node.inputs[0]).is_joint() && !is_early(&node)) {
      rows = rows_of_linear_loss(node, loss);
      if (loss.has_hidden_grad) {
        rows = unite(rows, of(node.outputs.at(loss.hidden_grad())).needed);
      }
    }
    if (!rows.is_all()) work_[&node] = {.rows = rows};
    need(node.inputs[0], loss.has_logits ? RowSet::all() : rows);
    for (size_t i = 1; i < node.inputs.size(); ++i) need(node.inputs[i], RowSet::all());
  }

  // Whether the node computes the gradient of x[:, place].
  static bool is_select_backward(const Node& node) {
    return ir::is(&node, "ATen", ir::kAtenDomain) &&
           ir::string_attr(node.attrs, "operator", "") == ops::aten::kSelectBackward;
  }

  void nonzero_of_select_backward(Node& node) {
    const Value* result = node.outputs[0];
    const Form form = leading(result);
    const auto dim = constant_int(ir::dim_attr(node.attrs, "dim", 0));
    const auto index = constant_int(ir::dim_attr(node.attrs, "index", 0));
    if (form == Form{0, 1} && dim == 1 && index) {
      set(result, form, atom({.kind = Atom::Kind::kPlace, .place = *index}));
    }
  }

  // The rows that x[:, place] reads: one position of each sequence.
  std::optional<RowSet> place_of_gather(const Node& node) {
    if (!ir::is(&node, "Gather")) return std::nullopt;
    const Value *x = node.inputs[0], *index = node.inputs[1];
    const Form form = of(x).form;
    if (!form.is_there() || form.is_joint() || !x->type.shape || !index->type.shape ||
        !index->type.shape->empty() || !ops::has_known_ints(index) ||
        axis_of(node, static_cast<int64_t>(x->type.shape->size())) != form.place) {
      return std::nullopt;
    }
    const auto place = constant_int(ops::known_ints(index).at(0));
    if (!place) return std::nullopt;
    return atom({.kind = Atom::Kind::kPlace, .place = *place});
  }

  // Whether the node sums floats over all rows, for each column.
  bool is_sum_of_rows(const Node& node) {
    if (!ir::is(&node, "ReduceSum") || node.inputs.size() != 2 ||
        !region::has_kernel(node.inputs[0], "Rows") ||
        !region::has_kernel(node.outputs[0], "Rows")) {
      return false;
    }
    const Form form = of(node.inputs[0]).form;
    const auto axes = ops::reduction_axes(node);
    if (!form.is_leading() || !axes || !node.outputs[0]->type.shape) return false;
    return *axes == (form.is_joint() ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 1}) &&
           ops::fused_form(node).kind == Kind::kSum;
  }

  void needed_of_sum(Node& node) {
    const RowSet rows = is_early(&node) ? RowSet::all() : of(node.inputs[0]).nonzero;
    if (!rows.is_all()) work_[&node] = {.rows = rows, .sums = true};
    need(node.inputs[0], rows);
    need(node.inputs[1], RowSet::all());
  }

  void find_needed(Node& node) {
    if (is_sum_of_rows(node)) return needed_of_sum(node);
    if (is_ours(node, "Region")) return needed_of_region(node);
    if (is_ours(node, "Attention") || is_ours(node, "AttentionGrad")) {
      return needed_of_attention(node);
    }
    if (is_product(node)) return needed_of_product(node);
    if (is_ours(node, "LinearCrossEntropy")) return needed_of_linear_loss(node);
    const std::optional<RowSet> place = place_of_gather(node);
    const bool is_view = !is_early(&node) && form_of_view(node).has_value();
    const Form form = is_view || is_early(&node) ? Form() : form_of_pointwise(node);
    RowSet read = RowSet::none();
    for (const Value* output : node.outputs) {
      if (output != nullptr) read = unite(read, of(output).needed);
    }
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      RowSet rows = RowSet::all();
      if (is_view && i < num_viewed(node)) rows = read;
      if (form.is_there() && has_all_of(node.inputs[i], node.outputs[0], form)) rows = read;
      if (place && i == 0) rows = *place;
      need(node.inputs[i], rows);
    }
  }

  // Finds the nodes that the conditions depend on. They must come before all nodes that get a list.
  // False if they cannot.
  bool find_early() {
    std::vector<const Value*> open;
    for (const Atom& each : atoms_) {
      if (each.source != nullptr) open.push_back(each.source);
    }
    while (!open.empty()) {
      const Node* node = open.back()->producer;
      open.pop_back();
      if (node == nullptr || !early_.insert(node).second) continue;
      if (!ops::is_pure(*node) || backward_.contains(node)) return false;
      for (const Value* input : node->inputs) {
        if (input != nullptr) open.push_back(input);
      }
    }
    return true;
  }

  Graph& graph_;
  RowSpace space_;
  const RowSources sources_;
  std::vector<Node*> nodes_;
  std::unordered_set<const Node*> backward_, early_;
  std::vector<Atom> atoms_;
  std::unordered_map<const Value*, Facts> facts_;
  std::unordered_map<const Node*, Region> regions_;
  std::unordered_map<const Node*, Work> work_;
  std::unordered_set<const Value*> zeroed_;
};

// ---- the rewrite

class Rewriter {
 public:
  Rewriter(Graph& graph, Analysis& analysis) : graph_(graph), analysis_(analysis) {}

  int run(PassContext& context) {
    const std::vector<Node*>& nodes = analysis_.nodes();
    const auto has_work = [this](const Node* node) { return analysis_.work(node) != nullptr; };
    // All of this is one rewrite, because the rows that one node leaves out must be left out by all
    // its readers.
    if (std::none_of(nodes.begin(), nodes.end(), has_work) || !context.may_rewrite()) return 0;
    device_ = (*std::find_if(nodes.begin(), nodes.end(), has_work))->outputs[0]->type.device;
    move_early();
    for (Node* node : nodes) {
      for (Value* output : node->outputs) {
        if (output != nullptr && analysis_.is_zeroed(output)) write_zeros(*node, *output);
      }
    }
    for (Node* node : nodes) {
      if (has_work(node)) rewrite(*node, *analysis_.work(node));
    }
    if (context.budget_report != nullptr) report_lists(context.budget, *context.budget_report);
    return 1;
  }

  // Nodes of the forward half keep the lists that they have, or compute all rows.
  int run_again() {
    const std::vector<Node*>& nodes = analysis_.nodes();
    const auto is_free = [this](const Node* node) { return analysis_.is_backward(node); };
    const auto suffices = [&](const Node* node) { return is_free(node) || has_enough(*node); };
    if (!std::all_of(nodes.begin(), nodes.end(), suffices)) return 0;
    device_ = nodes.front()->outputs[0]->type.device;
    move_early();
    for (Node* node : nodes) {
      if (!is_ours(*node, "Rows")) continue;
      lists_.try_emplace(analysis_.set_of(*node), node->outputs[0]);
    }
    for (Node* node : nodes) {
      if (!is_free(node) && ops::row_list_inputs(*node).empty()) continue;
      for (Value* output : node->outputs) {
        if (output == nullptr || !analysis_.is_zeroed(output)) continue;
        if (!is_ours(*node, "ZeroRows")) {
          write_zeros(*node, *output);
        } else if (is_free(node)) {
          ir::set_input(*node, 1, list(analysis_.facts(output).nonzero));
        }
      }
    }
    for (Node* node : nodes) {
      if (!is_free(node) || is_ours(*node, "ZeroRows")) continue;
      const std::vector<int> slots = ops::row_list_inputs(*node);
      const Analysis::Work work = analysis_.work_or_all(node);
      if (!slots.empty()) {
        ir::set_input(*node, slots[0], list(work.rows));
        if (slots.size() > 1) ir::set_input(*node, slots[1], list(work.keys));
      } else if (analysis_.work(node) != nullptr) {
        rewrite(*node, work);
      }
    }
    // Lists that nobody reads any more stay: a backward half for other gradients may need them.
    return 1;
  }

 private:
  // Whether the rows that the node computes are all that its readers want.
  bool has_enough(const Node& node) {
    const std::vector<int> slots = ops::row_list_inputs(node);
    if (slots.empty() || is_ours(node, "ZeroRows")) return true;
    const Analysis::Work work = analysis_.work_or_all(&node);
    const auto lists = [&](int slot) { return analysis_.set_of(*node.inputs[slot]->producer); };
    return lists(slots[0]).contains(work.rows) &&
           (slots.size() < 2 || lists(slots[1]).contains(work.keys));
  }

  // Moves the nodes that the conditions depend on to the front; the lists are written after them.
  void move_early() {
    std::vector<Node*> order;
    for (Node* node : analysis_.nodes()) {
      if (analysis_.is_early(node)) order.push_back(node);
    }
    for (Node* node : analysis_.nodes()) {
      if (analysis_.is_early(node)) continue;
      if (first_ == nullptr) first_ = node;
      order.push_back(node);
    }
    ir::reorder(graph_, order);
  }

  // Writes zeros for all readers of the value. Those that read only nonzero rows are not affected.
  void write_zeros(Node& node, Value& value) {
    const auto next = std::next(node.position);
    ops::Writer write(graph_, next == graph_.nodes.end() ? nullptr : &*next);
    Value* zeroed =
        write.make_ours("ZeroRows", {&value, list(analysis_.facts(&value).nonzero)}, value.type);
    ir::replace_uses(value, *zeroed, graph_);
    ir::set_input(*zeroed->producer, 0, &value);
  }

  void rewrite(Node& node, const Analysis::Work& work) {
    if (is_ours(node, "Region")) {
      region::RegionSpec spec = region::read(node);
      spec.has_row_list = true;
      region::write(spec, node.attrs);
      ir::set_input(node, static_cast<int>(node.inputs.size()), list(work.rows));
    } else if (is_ours(node, "Attention") || is_ours(node, "AttentionGrad")) {
      const int count = static_cast<int>(node.inputs.size());
      ir::set_input(node, count, list(work.rows));
      ir::set_input(node, count + 1, list(work.keys));
      node.attrs["has_rows"] = int64_t{1};
    } else if (is_ours(node, "LinearCrossEntropy")) {
      rewrite_linear_loss(node, work);
    } else if (ir::is(&node, "ReduceSum")) {
      rewrite_sum(node, work);
    } else {
      rewrite_product(node, work);
    }
  }

  void rewrite_linear_loss(Node& node, const Analysis::Work& work) {
    ops::LinearLoss loss = ops::linear_loss(node);
    loss.has_row_list = true;
    ops::write(loss, node.attrs);
    ir::set_input(node, static_cast<int>(node.inputs.size()), list(work.rows));
    const Shape& weight = *node.inputs[1]->type.shape;
    node.outputs[1]->type.shape =
        Shape{ops::workspace_size(loss, weight[0].constant(), weight[1].constant())};
  }

  void rewrite_product(Node& node, const Analysis::Work& work) {
    ops::Writer write(graph_, &node);
    Value* start = ops::start_of(node);
    ir::Attrs attrs;
    attrs["sums"] = int64_t{work.sums ? 1 : 0};
    Value* result = node.outputs[0];
    Node& product = write.add_named(node.name, {ir::kTorchOrtDomain, "RowsProduct"},
                                    {node.inputs[0], node.inputs[1], start, list(work.rows)},
                                    {result->type}, std::move(attrs));
    ir::replace_uses(*result, *product.outputs[0], graph_);
    ir::erase(graph_, node);
  }

  // A sum over rows becomes a region of its own.
  void rewrite_sum(Node& node, const Analysis::Work& work) {
    Value *x = node.inputs[0], *result = node.outputs[0];
    region::RegionSpec spec;
    spec.body = std::make_shared<Graph>();
    Value& operand = ir::add_input(*spec.body, x->name + "_in", x->type);
    ops::Writer inner(*spec.body, nullptr);
    Node& sum = inner.add(node.op, {&operand, inner.ints(ops::known_ints(node.inputs[1]))},
                          {result->type}, node.attrs);
    ir::add_output(*spec.body, *sum.outputs[0]);
    spec.rows = analysis_.space().num_rows();
    spec.columns = ir::numel(*result->type.shape);
    spec.spaces = {Space::kFull};
    spec.has_row_list = true;
    ir::Attrs attrs;
    region::write(spec, attrs);
    ops::Writer write(graph_, &node);
    Node& region = write.add_named(node.name, {ir::kTorchOrtDomain, "Region"}, {x, list(work.rows)},
                                   {result->type}, std::move(attrs));
    ir::replace_uses(*result, *region.outputs[0], graph_);
    ir::erase(graph_, node);
  }

  // Lists that the backward half reads are held beside the values that the budget has counted.
  void report_lists(const Budget* budget, BudgetReport& report) const {
    const std::unordered_set<const Node*> backward = backward_nodes(graph_);
    for (const auto& [rows, list] : lists_) {
      const bool crosses =
          std::any_of(list->uses.begin(), list->uses.end(),
                      [&](const ir::Use& use) { return backward.contains(use.node); });
      if (!crosses || backward.contains(list->producer)) continue;
      report.list_bytes += hinted_size(graph_, ir::numel(*list->type.shape)).value_or(0) *
                           ir::size_bytes(list->type.dtype);
    }
    for (int64_t* bytes :
         {&report.dense_bytes, &report.dense_held_bytes, &report.peak_bytes, &report.held_bytes}) {
      *bytes += report.list_bytes;
    }
    report.allowed_bytes = budget != nullptr ? budget->bytes(report.dense_bytes)
                                             : report.allowed_bytes + report.list_bytes;
  }

  Value* list(const RowSet& rows) {
    const auto [found, is_new] = lists_.try_emplace(rows, nullptr);
    if (is_new) found->second = make_list(rows);
    return found->second;
  }

  Value* make_list(const RowSet& rows) {
    std::vector<Value*> sources;
    Shape ignored, causal, places;
    std::vector<std::string> kinds;
    for (size_t i = 0; i < analysis_.atoms().size(); ++i) {
      if ((rows.atoms() >> i & 1) == 0) continue;
      const Atom& atom = analysis_.atoms()[i];
      if (atom.kind == Atom::Kind::kPlace) {
        places.emplace_back(atom.place);
        continue;
      }
      sources.push_back(atom.source);
      kinds.emplace_back(atom.kind == Atom::Kind::kLabels ? "labels" : "mask");
      ignored.emplace_back(atom.ignored);
      causal.emplace_back(int64_t{atom.is_causal ? 1 : 0});
    }
    ir::Attrs attrs;
    if (rows.is_closed()) attrs["is_closed"] = int64_t{1};
    if (rows.is_all()) attrs["is_all"] = int64_t{1};
    if (!places.empty()) attrs["places"] = places;
    if (!kinds.empty()) {
      attrs["kinds"] = kinds;
      attrs["ignored"] = ignored;
      attrs["is_causal"] = causal;
    }
    const ir::Type type{
        .dtype = ir::DType::kInt64,
        .shape = Shape{analysis_.space().sequences, ops::plus(analysis_.space().length, 1)},
        .device = device_};
    ops::Writer write(graph_, first_);
    return write.make_ours("Rows", std::move(sources), type, std::move(attrs));
  }

  Graph& graph_;
  Analysis& analysis_;
  Node* first_ = nullptr;
  ir::Device device_;
  std::map<RowSet, Value*> lists_;
};

// The rows of the model: the positions of the first attention over sequences, or the labels of a
// loss.
std::optional<RowSpace> find_space(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (node.is_erased() || !is_ours(node, "Attention")) continue;
    const auto &query = node.inputs[0]->type.shape, &key = node.inputs[1]->type.shape;
    if (query && key && query->size() == 4 && (*query)[2] == (*key)[2]) {
      return RowSpace{(*query)[0], (*query)[2]};
    }
  }
  for (const Node& node : graph.nodes) {
    if (node.is_erased()) continue;
    if (is_ours(node, "LinearCrossEntropy") && node.inputs[2]->type.shape) {
      return RowSpace{1, ir::numel(*node.inputs[2]->type.shape)};
    }
    if (!is_ours(node, "Region")) continue;
    for (const Node& inner : ops::region_body(node).nodes) {
      if (is_ours(inner, "RowPick") && inner.inputs[1]->type.shape) {
        return RowSpace{1, ir::numel(*inner.inputs[1]->type.shape)};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

// If the backward half has been cut down, fewer rows of it may be needed: if logits are returned
// beside a loss but get no gradient, rows without a label are not.
int row_sparsity_again(Graph& graph, PassContext& context) {
  const std::optional<RowSpace> space = find_space(graph);
  if (!space) return 0;
  Analysis analysis(graph, *space, context.row_sources);
  analysis.run();
  return analysis.has_atoms() ? Rewriter(graph, analysis).run_again() : 0;
}

int row_sparsity(Graph& graph, PassContext& context) {
  const auto is_done = [](const Node& node) { return is_ours(node, "Rows"); };
  if (std::any_of(graph.nodes.begin(), graph.nodes.end(), is_done)) return 0;
  const std::optional<RowSpace> space = find_space(graph);
  if (!space) return 0;
  Analysis analysis(graph, *space, context.row_sources);
  analysis.run();
  return analysis.has_atoms() ? Rewriter(graph, analysis).run(context) : 0;
}

}  // namespace torch_ort::passes
