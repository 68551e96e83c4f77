// Regions, whose bodies are small graphs, and sums over rows, which become regions of their own.
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/rows/rewriter.h"
#include "passes/rows/transfer.h"
#include "region/codegen.h"
#include "region/contract.h"
#include "region/schedule.h"

#include <algorithm>

namespace torch_ort::passes::rows {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Value;
using region::Space;
using Kind = ops::FusedForm::Kind;
using Step = region::Schedule::Step;
// The nonzero rows of the values of a body.
using Inner = std::unordered_map<const Value*, RowSet>;

bool adds_rows(const Step& step) {
  return step.axes == region::Schedule::Axes::kAll || step.axes == region::Schedule::Axes::kRows;
}

// Whether the region reads this operand row by row.
bool is_by_rows(const region::Schedule& schedule, size_t operand) {
  const Space space = schedule.spec.spaces[operand];
  return schedule.stretched[operand].shape.empty() &&
         (space == Space::kFull || space == Space::kRow);
}

// The number of leading dims whose product is the number of rows; 0 if there is none.
size_t leading_dims(const Shape& shape, const Dim& rows) {
  Dim product = 1;
  for (size_t count = 0; count < shape.size();) {
    product = ops::times(product, shape[count++]);
    if (product == rows) return count;
  }
  return 0;
}

// The form that the results of a region share with its operands; none if they do not.
Form followed_form(Analysis& rows, const Node& node, const region::Schedule& schedule) {
  bool joins = false, reduces = false;
  for (const Step& step : schedule.steps) {
    if (adds_rows(step) || step.form.has_label()) return {};
    joins = joins || step.form.kind == Kind::kConcat;
    reduces = reduces || step.form.is_reduction() || step.form.kind == Kind::kGather;
  }
  for (size_t i = 0; i < schedule.spec.spaces.size(); ++i) {
    const Form form = rows.of(node.inputs[i]).form;
    if (!form.is_there() || !is_by_rows(schedule, i)) continue;
    const Shape& shape = *node.inputs[i]->type.shape;
    const size_t count = reduces ? leading_dims(shape, schedule.spec.rows) : shape.size();
    if (count <= static_cast<size_t>(std::max(form.sequence, form.place))) return {};
    const auto fits = [&](const Value* value) {
      const Shape& other = *value->type.shape;
      if (reduces ? other.size() < count : other.size() != count) return false;
      for (size_t dim = 0; dim < count; ++dim) {
        const bool may_differ = joins && !reduces && !form.has(static_cast<int64_t>(dim));
        if (!may_differ && !(other[dim] == shape[dim])) return false;
      }
      return true;
    };
    const auto agrees = [&](const Value* value) {
      return !(rows.of(value).form == form) || fits(value);
    };
    const bool is_form = std::all_of(node.outputs.begin(), node.outputs.end(), fits) &&
                         std::all_of(node.inputs.begin(), node.inputs.end(), agrees);
    return is_form ? form : Form();
  }
  return {};
}

// The value of a body that nodes pass on unchanged as `value`.
Value* passed_on(Value* value) {
  while (value->producer != nullptr && ops::fused_form(*value->producer).kind == Kind::kPass) {
    value = value->producer->inputs[0];
  }
  return value;
}

// The input of the node that its body passes on as `value`; nullptr if it is another value.
Value* input_passed_on(const Node& node, const ir::Graph& body, Value* value) {
  const auto found = std::find(body.inputs.begin(), body.inputs.end(), passed_on(value));
  return found == body.inputs.end() ? nullptr : node.inputs[found - body.inputs.begin()];
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
  if (!ir::is(node, "Region", ir::kTorchOrtDomain)) return nullptr;
  // A region that computes a loss may also copy the labels. Such a copy selects the same rows as
  // the labels themselves.
  const ir::Graph& body = ops::region_body(*node);
  Value* given = input_passed_on(*node, body, body.outputs[result.index]);
  return given != nullptr && given->type.dtype == result.type.dtype ? given : nullptr;
}

// The rows whose label, which a node of the body reads, is not the ignored one.
RowSet labelled_by(Analysis& rows, const Node& node, const ir::Graph& body, const Node& reader,
                   size_t slot) {
  if (!ir::has_attr(reader.attrs, "ignore_index")) return RowSet::all();
  Value* labels = input_passed_on(node, body, reader.inputs[slot]);
  return labels == nullptr ? RowSet::all()
                           : labelled(rows, labels, ir::int_attr(reader.attrs, "ignore_index", 0));
}

RowSet nonzero_of_step(Analysis& rows, const Node& node, const ir::Graph& body, const Step& step,
                       const Inner& inner) {
  std::vector<RowSet> operands;
  for (const Value* value : step.node->inputs) {
    const auto found = inner.find(value);
    const bool is_zero = value != nullptr && ops::known_double(value) == 0.0;
    operands.push_back(found != inner.end() ? found->second
                       : is_zero            ? RowSet::none()
                                            : RowSet::all());
  }
  const Node& reader = *step.node;
  switch (step.form.kind) {
    case Kind::kPass:
    case Kind::kSum:
    case Kind::kMean:
    case Kind::kMax:
    case Kind::kMin: return operands[0];
    case Kind::kPointwise: return nonzero_of_word(step.form.op, operands, step.form.constants);
    case Kind::kConcat: return unite(operands);
    case Kind::kPick: return intersect(labelled_by(rows, node, body, reader, 1), operands[0]);
    case Kind::kScatter: return intersect(labelled_by(rows, node, body, reader, 0), operands[1]);
    case Kind::kValid: return labelled_by(rows, node, body, reader, 0);
    default: return RowSet::all();
  }
}

void nonzero_of_region(Analysis& rows, Node& node) {
  const region::Schedule schedule = region::make_schedule(node);
  const region::RegionSpec& spec = schedule.spec;
  RegionRows& region = rows.regions[&node];
  region.takes_list = spec.rows == rows.space().num_rows() && schedule.groups == Dim(1) &&
                      region::has_kernel(node.outputs[0], "Rows");
  // If all queries share one head of keys, this has as many rows as the model, but with the dims of
  // heads.
  const auto has_heads = [&](const Value* value) {
    const Form& form = rows.of(value).form;
    return form.is_there() && !form.is_leading();
  };
  Form form;
  if (!region.takes_list || std::any_of(node.inputs.begin(), node.inputs.end(), has_heads)) {
    form = followed_form(rows, node, schedule);
  }
  region.follows = form.is_there();
  region.takes_list = region.takes_list && !region.follows;
  for (size_t i = 0; i < spec.spaces.size(); ++i) {
    const Form& of_operand = rows.of(node.inputs[i]).form;
    const bool lies = region.takes_list ? of_operand.is_leading() : of_operand == form;
    region.has_rows.push_back(lies && is_by_rows(schedule, i) && of_operand.is_there());
  }
  Inner inner;
  std::unordered_set<const Value*> totals;
  if (region.takes_list || region.follows) {
    for (size_t i = 0; i < spec.body->inputs.size(); ++i) {
      inner.emplace(spec.body->inputs[i],
                    region.has_rows[i] ? rows.of(node.inputs[i]).nonzero : RowSet::all());
    }
    for (const Step& step : schedule.steps) {
      if (step.form.kind == Kind::kConcat) region.takes_list = false;
      inner.emplace(step.node->outputs[0], nonzero_of_step(rows, node, *spec.body, step, inner));
      if (!adds_rows(step)) continue;
      totals.insert(step.node->outputs[0]);
      const auto added = inner.find(step.node->inputs[0]);
      region.of_totals =
          unite(region.of_totals, added == inner.end() ? RowSet::all() : added->second);
    }
  }
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    Value* result = spec.body->outputs[i];
    const auto nonzero = inner.find(result);
    region.is_total.push_back(totals.contains(passed_on(result)));
    if (region.is_total[i] || !(region.takes_list || region.follows)) {
      rows.set(node.outputs[i], Form(), RowSet::all());
    } else {
      rows.set(node.outputs[i], region.takes_list ? rows.leading(node.outputs[i]) : form,
               nonzero == inner.end() ? RowSet::all() : nonzero->second);
    }
  }
}

void needed_of_region(Analysis& rows, Node& node) {
  const RegionRows& region = rows.regions.at(&node);
  RowSet wanted = region.takes_list ? region.of_totals : RowSet::none();
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i]->uses.empty() || region.is_total[i]) continue;
    const Facts& facts = rows.of(node.outputs[i]);
    // A region with a list writes zeros to the other rows itself. Without a list it computes zeros
    // from the zeros of its operands.
    const RowSet more = region.takes_list ? intersect(facts.needed, facts.nonzero) : facts.needed;
    wanted = unite(wanted, facts.form.is_there() ? more : RowSet::all());
  }
  if (region.takes_list) {
    wanted = rows.compute(node, {.rows = wanted}).rows;
  } else if (!region.follows || rows.is_early(node)) {
    wanted = RowSet::all();
  }
  for (size_t i = 0; i < region.has_rows.size(); ++i) {
    // Ids are read in all rows, because eager PyTorch raises an error for a bad id in any row.
    rows.need(node.inputs[i], region.has_rows[i] ? wanted : RowSet::all());
  }
}

void list_region(Rewriter& rewriter, Node& node, const Work& work) {
  region::RegionSpec spec = region::read(node);
  spec.has_row_list = true;
  region::write(spec, node.attrs);
  ir::set_input(node, static_cast<int>(node.inputs.size()), rewriter.list(work.rows));
}

// Whether the node sums floats over all rows, for each column.
bool is_sum_of_rows(Analysis& rows, const Node& node) {
  if (node.inputs.size() != 2 || !region::has_kernel(node.inputs[0], "Rows") ||
      !region::has_kernel(node.outputs[0], "Rows")) {
    return false;
  }
  const Form form = rows.of(node.inputs[0]).form;
  const auto axes = ops::reduction_axes(node);
  if (!form.is_leading() || !axes || !node.outputs[0]->type.shape) return false;
  return *axes == (form.is_joint() ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 1}) &&
         ops::fused_form(node).kind == Kind::kSum;
}

void needed_of_sum(Analysis& rows, Node& node) {
  const RowSet nonzero = rows.of(node.inputs[0]).nonzero;
  rows.need(node.inputs[0], rows.compute(node, {.rows = nonzero, .sums = true}).rows);
  rows.need(node.inputs[1], RowSet::all());
}

// The sum becomes a region of its own.
void list_sum(Rewriter& rewriter, Node& node, const Work& work) {
  Value *x = node.inputs[0], *result = node.outputs[0];
  region::RegionSpec spec;
  spec.body = std::make_shared<ir::Graph>();
  Value& operand = ir::add_input(*spec.body, x->name + "_in", x->type);
  ops::Writer inner(*spec.body, nullptr);
  Node& sum = inner.add(node.op, {&operand, inner.ints(ops::known_ints(node.inputs[1]))},
                        {result->type}, node.attrs);
  ir::add_output(*spec.body, *sum.outputs[0]);
  spec.rows = rewriter.space().num_rows();
  spec.columns = ir::numel(*result->type.shape);
  spec.spaces = {Space::kFull};
  spec.has_row_list = true;
  ir::Attrs attrs;
  region::write(spec, attrs);
  rewriter.replace(node, "Region", {x, rewriter.list(work.rows)}, std::move(attrs));
}

constexpr Transfer kTransfers[] = {
    {"torch_ort.Region", nullptr, nonzero_of_region, needed_of_region, list_region},
    {"ReduceSum", is_sum_of_rows, nonzero_of_others, needed_of_sum, list_sum},
};

}  // namespace

RowSet labelled(Analysis& rows, Value* labels, int64_t ignored) {
  while (Value* given = given_on(*labels)) labels = given;
  const ir::DType dtype = labels->type.dtype;
  const bool is_integer = dtype == ir::DType::kInt64 || dtype == ir::DType::kInt32;
  if (!is_integer || !rows.is_all_rows(labels)) return RowSet::all();
  return rows.atom({.kind = Atom::Kind::kLabels, .source = labels, .ignored = ignored});
}

std::span<const Transfer> of_regions() { return kTransfers; }

}  // namespace torch_ort::passes::rows
