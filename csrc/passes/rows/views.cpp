// Ops that move elements but keep those of a row together, those that compute each element by
// itself, and all others, which need all rows.
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/rows/transfer.h"

#include <algorithm>
#include <iterator>

namespace torch_ort::passes::rows {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Value;
using Kind = ops::FusedForm::Kind;
using MaybeForm = std::optional<Form>;

int64_t from_front(int64_t axis, int64_t rank) { return axis < 0 ? axis + rank : axis; }

int64_t axis_of(const Node& node) {
  return from_front(ir::int_attr(node.attrs, "axis", 0), ops::rank_of(*node.inputs[0]));
}

std::optional<int64_t> constant_int(const Dim& dim) {
  return dim.is_constant() ? std::optional(dim.constant()) : std::nullopt;
}

// ---- views: from the form of the first input to that of the results

MaybeForm same_form(Analysis&, const Node&, Form form) { return form; }

// The dims of the rows after a reshape from `shape` to `other`.
MaybeForm form_in(const Shape& shape, Form form, const Shape& other) {
  const auto find = [&](int dim) {
    Dim before = 1;
    for (int i = 0; i < dim; ++i) before = ops::times(before, shape[static_cast<size_t>(i)]);
    Dim here = 1;
    for (size_t i = 0; i < other.size(); here = ops::times(here, other[i++])) {
      if (here == before && other[i] == shape[static_cast<size_t>(dim)]) return static_cast<int>(i);
    }
    return -1;
  };
  const Form made{find(form.sequence), find(form.place)};
  const bool is_found = made.sequence >= 0 && made.place >= 0;
  return is_found && made.is_joint() == form.is_joint() ? MaybeForm(made) : std::nullopt;
}

MaybeForm form_of_reshape(Analysis& rows, const Node& node, Form form) {
  const Value *x = node.inputs[0], *result = node.outputs[0];
  if (*x->type.shape == *result->type.shape) return form;
  const Form made = rows.leading(result);
  if (form.is_leading() && made.is_there()) return made;
  return form_in(*x->type.shape, form, *result->type.shape);
}

// Of a node that takes parts of some dims, or repeats along them: the form if it leaves the dims of
// the rows as they are.
MaybeForm form_of_parts(Analysis&, const Node& node, Form form) {
  const Shape &from = *node.inputs[0]->type.shape, &to = *node.outputs[0]->type.shape;
  if (from.size() != to.size()) return {};
  if (ir::is(&node, "Split") && form.has(axis_of(node))) return {};
  // A slice with step 1 that keeps the size of a dim takes all of it.
  const bool has_steps = node.inputs.size() > 4 && node.inputs[4] != nullptr;
  if (ir::is(&node, "Slice") && has_steps) {
    if (node.inputs[3] == nullptr || !ops::has_known_ints(node.inputs[3])) return {};
    for (const Dim& axis : ops::known_ints(node.inputs[3])) {
      if (form.has(from_front(axis.constant(), ops::rank_of(*node.inputs[0])))) return {};
    }
  }
  const auto same = [&](int dim) {
    return from[static_cast<size_t>(dim)] == to[static_cast<size_t>(dim)];
  };
  return same(form.sequence) && same(form.place) ? MaybeForm(form) : std::nullopt;
}

// A sum over dims that are not those of rows.
MaybeForm form_of_sum(Analysis&, const Node& node, Form form) {
  const auto axes = ops::reduction_axes(node);
  if (!axes || ops::fused_form(node).kind != Kind::kSum) return {};
  const bool keeps = ir::int_attr(node.attrs, "keepdims", 1) != 0;
  for (auto axis = axes->rbegin(); axis != axes->rend(); ++axis) {
    if (form.has(*axis)) return {};
    if (!keeps) form = form.without(*axis);
  }
  return form;
}

MaybeForm form_of_transpose(Analysis&, const Node& node, Form form) {
  const Shape order = ir::ints_attr(node.attrs, "perm", {});
  if (static_cast<int64_t>(order.size()) != ops::rank_of(*node.inputs[0])) return {};
  Form made;
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i].constant() == form.sequence) made.sequence = static_cast<int>(i);
    if (order[i].constant() == form.place) made.place = static_cast<int>(i);
  }
  return made;
}

// One index along a dim that is not one of rows.
MaybeForm form_of_gather(Analysis&, const Node& node, Form form) {
  const auto& indices = node.inputs[1]->type.shape;
  const int64_t axis = axis_of(node);
  if (!indices || !indices->empty() || form.has(axis)) return {};
  return form.without(axis);
}

// With dims of size 1 put in, or taken away.
MaybeForm form_with_ones(Analysis&, const Node& node, Form form) {
  if (node.inputs.size() != 2 || !ops::has_known_ints(node.inputs[1])) return {};
  const bool removes = ir::is(&node, "Squeeze");
  const int64_t rank = ops::rank_of(removes ? *node.inputs[0] : *node.outputs[0]);
  std::vector<int64_t> axes;
  for (const Dim& axis : ops::known_ints(node.inputs[1])) {
    axes.push_back(from_front(axis.constant(), rank));
  }
  std::sort(axes.begin(), axes.end());
  if (removes) std::reverse(axes.begin(), axes.end());
  for (int64_t axis : axes) {
    if (removes && form.has(axis)) return {};
    if (removes) {
      form = form.without(axis);
    } else {
      form.sequence += axis <= form.sequence ? 1 : 0;
      form.place += axis <= form.place ? 1 : 0;
    }
  }
  return form;
}

MaybeForm form_of_concat(Analysis& rows, const Node& node, Form form) {
  const auto differs = [&](const Value* part) { return !(rows.of(part).form == form); };
  const bool fits =
      !form.has(axis_of(node)) && std::none_of(node.inputs.begin(), node.inputs.end(), differs);
  return fits ? MaybeForm(form) : std::nullopt;
}

struct View {
  std::string_view op;
  MaybeForm (*form)(Analysis& rows, const Node& node, Form form);
};

constexpr View kViews[] = {
    {"Concat", form_of_concat},    {"Expand", form_of_parts},
    {"Gather", form_of_gather},    {"Identity", same_form},
    {"ReduceSum", form_of_sum},    {"Reshape", form_of_reshape},
    {"Slice", form_of_parts},      {"Split", form_of_parts},
    {"Squeeze", form_with_ones},   {"Transpose", form_of_transpose},
    {"Unsqueeze", form_with_ones}, {"torch_ort.ZeroRows", same_form},
};

// The form of the results of a view; nothing for other nodes, and for views that do not keep rows
// together.
MaybeForm form_of_view(Analysis& rows, const Node& node) {
  if (node.inputs.empty() || node.inputs[0] == nullptr) return {};
  if (node.outputs.size() != 1 && !ir::is(&node, "Split")) return {};
  const Form form = rows.of(node.inputs[0]).form;
  if (!form.is_there() || !node.inputs[0]->type.shape || !node.outputs[0]->type.shape) return {};
  const std::string op = node.op.str();
  const auto* view = std::find_if(std::begin(kViews), std::end(kViews),
                                  [&](const View& each) { return each.op == op; });
  return view == std::end(kViews) ? std::nullopt : view->form(rows, node, form);
}

size_t num_viewed(const Node& node) { return ir::is(&node, "Concat") ? node.inputs.size() : 1; }

// ---- point-wise nodes

// Whether the operand has the shape of the result, with rows in the same dims.
bool has_all_of(Analysis& rows, const Value* operand, const Value* result, Form form) {
  return operand != nullptr && operand->type.shape == result->type.shape &&
         rows.of(operand).form == form;
}

// The form of the result of a point-wise node; none if no operand has rows.
Form form_of_pointwise(Analysis& rows, const Node& node) {
  if (node.outputs.size() != 1 || node.outputs[0] == nullptr || !node.outputs[0]->type.shape ||
      ops::fused_form(node).kind != Kind::kPointwise) {
    return {};
  }
  for (const Value* input : node.inputs) {
    const Form form = input == nullptr ? Form() : rows.of(input).form;
    if (form.is_there() && has_all_of(rows, input, node.outputs[0], form)) return form;
  }
  return {};
}

// ---- one position of each sequence

// The rows that x[:, place] reads.
std::optional<RowSet> place_of_gather(Analysis& rows, const Node& node) {
  if (!ir::is(&node, "Gather")) return std::nullopt;
  const Value *x = node.inputs[0], *index = node.inputs[1];
  const Form form = rows.of(x).form;
  if (!form.is_there() || form.is_joint() || !x->type.shape || !index->type.shape ||
      !index->type.shape->empty() || !ops::has_known_ints(index) || axis_of(node) != form.place) {
    return std::nullopt;
  }
  const auto place = constant_int(ops::known_ints(index).at(0));
  if (!place) return std::nullopt;
  return rows.atom({.kind = Atom::Kind::kPlace, .place = *place});
}

// The gradient of x[:, index].
void nonzero_of_select_backward(Analysis& rows, Node& node) {
  const Value* result = node.outputs[0];
  const Form form = rows.leading(result);
  const auto dim = constant_int(ir::dim_attr(node.attrs, "dim", 0));
  const auto index = constant_int(ir::dim_attr(node.attrs, "index", 0));
  if (form == Form{0, 1} && dim == 1 && index) {
    rows.set(result, form, rows.atom({.kind = Atom::Kind::kPlace, .place = *index}));
  }
}

constexpr Transfer kTransfers[] = {
    {.op = ops::aten::kSelectBackward, .find_nonzero = nonzero_of_select_backward},
};

}  // namespace

std::span<const Transfer> of_views() { return kTransfers; }

RowSet nonzero_of_word(ops::Pointwise op, std::vector<RowSet> operands,
                       const std::vector<double>& constants) {
  for (double number : constants) {
    operands.push_back(number == 0 ? RowSet::none() : RowSet::all());
  }
  switch (ops::word(op).zero) {
    case ops::Zero::kUnknown: break;
    case ops::Zero::kFirst: return operands.at(0);
    case ops::Zero::kEither: return intersect(operands.at(0), operands.at(1));
    case ops::Zero::kAll: return unite(operands);
    case ops::Zero::kProduct:
      return unite(intersect(operands.at(0), operands.at(1)), operands.at(2));
  }
  return RowSet::all();
}

void nonzero_of_others(Analysis& rows, Node& node) {
  if (const MaybeForm form = form_of_view(rows, node)) {
    RowSet nonzero = RowSet::none();
    for (size_t i = 0; i < num_viewed(node); ++i) {
      nonzero = unite(nonzero, rows.of(node.inputs[i]).nonzero);
    }
    for (const Value* output : node.outputs) rows.set(output, *form, nonzero);
    return;
  }
  const Form form = form_of_pointwise(rows, node);
  if (!form.is_there()) return;
  const ops::FusedForm fused = ops::fused_form(node);
  std::vector<RowSet> operands;
  for (const Value* input : node.inputs) {
    const bool has_rows = has_all_of(rows, input, node.outputs[0], form);
    operands.push_back(has_rows ? rows.of(input).nonzero : RowSet::all());
  }
  rows.set(node.outputs[0], form, nonzero_of_word(fused.op, std::move(operands), fused.constants));
}

void needed_of_others(Analysis& rows, Node& node) {
  const std::optional<RowSet> place = place_of_gather(rows, node);
  const bool is_early = rows.is_early(node);
  const bool is_view = !is_early && form_of_view(rows, node).has_value();
  const Form form = is_view || is_early ? Form() : form_of_pointwise(rows, node);
  const RowSet read = rows.needed_of_outputs(node);
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    RowSet wanted = RowSet::all();
    if (is_view && i < num_viewed(node)) wanted = read;
    if (form.is_there() && has_all_of(rows, node.inputs[i], node.outputs[0], form)) wanted = read;
    if (place && i == 0) wanted = *place;
    rows.need(node.inputs[i], wanted);
  }
}

}  // namespace torch_ort::passes::rows
