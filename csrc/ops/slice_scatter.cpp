#include "ops/slice_scatter.h"

#include "base/error.h"
#include "ops/channels_last.h"
#include "ops/families.h"
#include "ops/shapes.h"

#include <algorithm>
#include <optional>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::Node;
using ir::Shape;
using ir::Type;
using enum AttrKind;

Type result_type(const Node& node) {
  if (has_input(node, 1)) {
    const Type& base = node.inputs[1]->type;
    return with_shape(base, base.shape);
  }
  if (!ir::has_attr(node.attrs, "shape")) {
    throw UserError("SliceScatter: shape: got none, want that of the result, if there is no base");
  }
  return with_shape(input(node, 0).type, ir::ints_attr(node.attrs, "shape", {}));
}

// Sizes that are symbols are checked when they are known (run/steps/slice_scatter.cpp).
void check_part(const std::vector<Stretch>& part, const Shape& whole) {
  if (part.size() != whole.size()) {
    throw UserError(concat("SliceScatter: part: got ", part.size(), " dims, want ", whole.size(),
                           " as the result has"));
  }
  for (size_t i = 0; i < part.size(); ++i) {
    const auto& [begin, size, step] = part[i];
    if (!size.is_constant() || !whole[i].is_constant()) continue;
    if (!is_within(begin, size.constant(), step, whole[i].constant())) {
      throw UserError(concat("SliceScatter: part: got ", size.constant(), " elements from ", begin,
                             " on with step ", step, " along axis ", i, ", want them within ",
                             whole[i].constant()));
    }
  }
}

std::vector<Type> infer_slice_scatter(const Node& node) {
  const Type type = result_type(node);
  if (input(node, 0).type.shape && type.shape) check_part(replaced_part(node), *type.shape);
  return {type};
}

// run/ has a form for such steps.
void lower_slice_scatter(const Node& node, CallList& calls) {
  ArgList args = {&input(node, 0)};
  if (has_input(node, 1)) args.emplace_back(node.inputs[1]);
  calls.add(kSliceScatterCall, "", std::move(args), node.outputs);
}

std::optional<RenamedAxes> rename_axes_of_slice_scatter(const Node& node) {
  RenamedAxes renamed{.attrs = node.attrs};
  const size_t rank = input(node, 0).type.shape->size();
  Shape axes = ir::ints_attr(node.attrs, "axes", {});
  for (Dim& axis : axes) axis = channels_last_axis(node, axis.constant(), rank);
  renamed.attrs.insert_or_assign("axes", axes);
  if (ir::has_attr(node.attrs, "shape")) {
    const Shape shape = ir::ints_attr(node.attrs, "shape", {});
    renamed.attrs.insert_or_assign("shape", channels_last_shape(shape));
  }
  return renamed;
}

}  // namespace

std::vector<Stretch> replaced_part(const Node& node) {
  std::vector<Stretch> part;
  for (const Dim& size : known_shape(node, input(node, 0))) part.push_back({.size = size});
  const Shape given = ir::ints_attr(node.attrs, "axes", {});
  const Shape starts = ir::ints_attr(node.attrs, "starts", {});
  const Shape steps = ir::ints_attr(node.attrs, "steps", Shape(given.size(), Dim(1)));
  if (starts.size() != given.size() || steps.size() != given.size()) {
    throw UserError(concat("SliceScatter: starts and steps: got ", starts.size(), " and ",
                           steps.size(), ", want ", given.size(), " as axes has"));
  }
  std::vector<int64_t> axes = wrap_axes(node, given, static_cast<int64_t>(part.size()));
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t start = starts[i].constant(), step = steps[i].constant();
    if (start < 0 || step < 1) {
      throw UserError(concat("SliceScatter: got start ", start, " and step ", step,
                             ", want a start from 0 and a step from 1 on"));
    }
    part[axes[i]].begin = start;
    part[axes[i]].step = step;
  }
  std::sort(axes.begin(), axes.end());
  if (std::adjacent_find(axes.begin(), axes.end()) != axes.end()) {
    throw UserError(concat("SliceScatter: axes: got ", ir::to_string(given), ", want each once"));
  }
  return part;
}

ir::Attrs attrs_of_part(const std::vector<Stretch>& part, const Shape& whole) {
  Shape axes, starts, steps;
  for (size_t i = 0; i < part.size(); ++i) {
    if (part[i] == Stretch{.size = whole[i]}) continue;
    axes.emplace_back(static_cast<int64_t>(i));
    starts.emplace_back(part[i].begin);
    steps.emplace_back(part[i].step);
  }
  const bool has_steps =
      std::any_of(steps.begin(), steps.end(), [](const Dim& step) { return !(step == Dim(1)); });
  ir::Attrs attrs{{"axes", axes}, {"starts", starts}};
  if (has_steps) attrs.emplace("steps", steps);
  return attrs;
}

void register_slice_scatter(Registry& ops) {
  Op op;
  op.name = "SliceScatter";
  op.domain = ir::kTorchOrtDomain;
  op.min_inputs = 1;
  op.max_inputs = 2;
  op.attributes = {{"axes", kInts}, {"shape", kDims}, {"starts", kInts}, {"steps", kInts}};
  op.infer = infer_slice_scatter;
  op.lower = lower_slice_scatter;
  op.work.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_axes_of_slice_scatter};
  ops.add(op);
}

}  // namespace torch_ort::ops
