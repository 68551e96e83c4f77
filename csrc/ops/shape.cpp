// Ops that move or view elements without computing: reshapes, slices, joins, padding, triangles.

#include "base/error.h"
#include "ops/aten_names.h"
#include "ops/families.h"
#include "ops/shapes.h"
#include "ops/viewed_strides.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::DimOp;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;
using Kind = FusedForm::Kind;

// In a Slice of ONNX the largest integer means the end, or any number near it.
constexpr int64_t kFarEnd = int64_t{1} << 40;

std::vector<Type> one(Type type) { return {std::move(type)}; }
std::vector<Type> unknown_shape(const Node& node) {
  return one(with_shape(input(node, 0).type, std::nullopt));
}

bool is_sized(const Node& node) { return input(node, 0).type.shape.has_value(); }
int64_t rank(const Node& node) {
  return static_cast<int64_t>(known_shape(node, input(node, 0)).size());
}

// ---- Reshape, Flatten

// The size that -1 stands for: all elements divided by the product of the other sizes. Equal dims
// are cancelled.
Dim rest_of(Shape from, const Shape& to) {
  Shape numbers;  // among `to`
  Shape divisors;
  for (const Dim& dim : to) {
    if (dim.is_constant()) {
      if (dim.constant() != -1) numbers.push_back(dim);
      continue;
    }
    auto same = std::find(from.begin(), from.end(), dim);
    if (same != from.end())
      from.erase(same);
    else
      divisors.push_back(dim);
  }
  Shape multiples, factors;
  for (const Dim& dim : from) (dim.is_constant() ? multiples : factors).push_back(dim);
  const int64_t above = ir::numel(multiples).constant(), below = ir::numel(numbers).constant();
  if (below != 0 && divisors.empty() && above % below == 0) {
    factors.push_back(above / below);
    return ir::numel(factors);
  }
  factors.push_back(above);
  divisors.push_back(below);
  return floor_div(ir::numel(factors), ir::numel(divisors));
}

Shape reshape_target(const Node& node) {
  const Value& x = input(node, 0);
  Shape target = known_ints(&input(node, 1));
  const bool keeps_zero = ir::int_attr(node.attrs, "allowzero", 0) != 0;
  for (size_t i = 0; i < target.size(); ++i) {
    if (target[i].is_constant() && target[i].constant() < -1) {
      throw UserError(
          concat("Reshape: size at ", i, ": got ", target[i].str(), ", want -1 or more"));
    }
    if (keeps_zero || !(target[i] == Dim(0))) continue;
    const Shape& from = known_shape(node, x);
    if (i >= from.size()) {
      throw UserError(concat("Reshape: size 0 at ", i, ": got an input of rank ", from.size()));
    }
    target[i] = from[i];
  }
  auto rest = std::find(target.begin(), target.end(), Dim(-1));
  const bool is_complete = x.type.shape.has_value();
  if (rest != target.end() && is_complete) *rest = rest_of(*x.type.shape, target);
  if (is_complete && ir::is_constant(*x.type.shape) && ir::is_constant(target) &&
      !(ir::numel(*x.type.shape) == ir::numel(target))) {
    throw UserError(concat("Reshape: number of elements: got ", ir::to_string(*x.type.shape),
                           ", want ", ir::to_string(target)));
  }
  return target;
}

// The product of two dims; nothing if it has more than 64 bits, as strides from a file may be
// anything.
std::optional<Dim> product(const Dim& a, const Dim& b) {
  if (!a.is_constant() || !b.is_constant()) return times(a, b);
  int64_t result = 0;
  if (__builtin_mul_overflow(a.constant(), b.constant(), &result)) return std::nullopt;
  return Dim(result);
}

}  // namespace

// Leading dims that are equal keep their strides. The others are matched from the last to the
// first: each run of contiguous old dims is divided among new dims. The remaining dims belong to
// the last run.
std::optional<Shape> viewed_strides(const Shape& from, const Shape& strides, const Shape& to) {
  Shape result(to.size(), Dim(1));
  size_t equal = 0;
  while (equal + 1 < from.size() && equal < to.size() && from[equal] == to[equal] &&
         !(from[equal] == Dim(1))) {
    result[equal] = strides[equal];
    ++equal;
  }
  size_t rest = to.size();
  Dim run = 1, wanted = 1;
  Dim step = from.empty() ? Dim(1) : strides.back();
  for (size_t i = from.size(); i-- > equal;) {
    const bool is_last = i == equal;
    run = times(run, from[i]);
    const bool ends_run = is_last || (!(from[i - 1] == Dim(1)) &&
                                      product(run, step) != std::optional(strides[i - 1]));
    if (!ends_run) continue;
    while (rest > equal && (is_last || !(wanted == run) || to[rest - 1] == Dim(1))) {
      const std::optional<Dim> stride = product(wanted, step);
      if (!stride) return std::nullopt;
      result[--rest] = *stride;
      wanted = times(wanted, to[rest]);
    }
    if (is_last) break;
    if (!(wanted == run)) return std::nullopt;
    step = strides[i - 1];
    run = wanted = 1;
  }
  return rest == equal ? std::optional(result) : std::nullopt;
}

namespace {

// The type of a view if the strides allow one, else of a row-major copy.
Type reshaped_type(const Type& type, Shape target) {
  const bool is_plain = !type.strides || !type.shape;
  if (is_plain || ir::numel(target) == Dim(0)) return with_shape(type, std::move(target));
  const std::optional<Shape> strides = viewed_strides(*type.shape, *type.strides, target);
  return strides ? view_type(type, std::move(target), *strides)
                 : with_shape(type, std::move(target));
}

std::vector<Type> infer_reshape(const Node& node) {
  if (!has_known_ints(&input(node, 1))) return unknown_shape(node);
  Shape target = reshape_target(node);
  if (std::find(target.begin(), target.end(), Dim(-1)) != target.end()) return unknown_shape(node);
  return one(reshaped_type(input(node, 0).type, std::move(target)));
}

void lower_reshape(const Node& node, CallList& calls) {
  calls.add("aten::reshape", "", {node.inputs[0], Arg::list(reshape_target(node))},
            {node.outputs[0]});
}

int reshape_since(const Node& node) {
  return ir::int_attr(node.attrs, "allowzero", 0) != 0 ? 14 : 5;
}

Shape flatten_target(const Node& node) {
  const Shape& from = known_shape(node, input(node, 0));
  const auto size = static_cast<int64_t>(from.size());
  // The axis may be one more than that of the last dim, so it is not wrapped as other axes are.
  int64_t axis = ir::int_attr(node.attrs, "axis", 1);
  if (axis < 0) axis += size;
  if (axis < 0 || axis > size) {
    throw UserError(concat("Flatten: axis out of range: got ", axis, ", want at most ", size));
  }
  return {ir::numel(Shape(from.begin(), from.begin() + axis)),
          ir::numel(Shape(from.begin() + axis, from.end()))};
}

std::vector<Type> infer_flatten(const Node& node) {
  if (!is_sized(node)) return unknown_shape(node);
  return one(reshaped_type(input(node, 0).type, flatten_target(node)));
}

void lower_flatten(const Node& node, CallList& calls) {
  calls.add("aten::reshape", "", {node.inputs[0], Arg::list(flatten_target(node))},
            {node.outputs[0]});
}

// ---- Transpose

std::vector<int64_t> permutation(const Node& node) {
  const int64_t size = rank(node);
  if (ir::has_attr(node.attrs, "perm")) {
    std::vector<int64_t> order = wrap_axes(node, ir::ints_attr(node.attrs, "perm", {}), size);
    std::vector<int64_t> sorted = order;
    std::sort(sorted.begin(), sorted.end());
    if (static_cast<int64_t>(order.size()) != size ||
        std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw UserError(
          concat("Transpose: perm: got ", order.size(), " axes, want each of ", size, " once"));
    }
    return order;
  }
  std::vector<int64_t> reversed(size);
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  return reversed;
}

std::vector<Type> infer_transpose(const Node& node) {
  if (!is_sized(node)) return unknown_shape(node);
  const Type& type = input(node, 0).type;
  const Shape from = strides_of(type);
  Shape shape, strides;
  for (int64_t axis : permutation(node)) {
    shape.push_back((*type.shape)[axis]);
    strides.push_back(from[axis]);
  }
  return one(view_type(type, std::move(shape), strides));
}

void lower_transpose(const Node& node, CallList& calls) {
  calls.add("aten::permute", "", {node.inputs[0], Arg::list(permutation(node))}, {node.outputs[0]});
}

// ---- Expand

// Aligns both shapes at their ends. The shape that is given may be shorter and contain ones.
std::optional<Shape> expand_target(const Node& node) {
  const Shape& from = known_shape(node, input(node, 0));
  Shape to = known_ints(&input(node, 1));
  if (to.size() < from.size()) to.insert(to.begin(), from.size() - to.size(), Dim(1));
  const size_t offset = to.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    Dim& dim = to[offset + i];
    if (dim == Dim(1)) dim = from[i];
    if (from[i] == Dim(1) || from[i] == dim) continue;
    // Which of two symbols is 1, if any, is known only when the graph runs.
    if (!from[i].is_constant() && !dim.is_constant()) return std::nullopt;
    dim = same_dim(node, from[i], dim);
  }
  return to;
}

std::vector<Type> infer_expand(const Node& node) {
  if (!is_sized(node) || !has_known_ints(&input(node, 1))) return unknown_shape(node);
  std::optional<Shape> to = expand_target(node);
  if (!to) return unknown_shape(node);
  return one(expanded_type(input(node, 0).type, std::move(*to)));
}

void lower_expand(const Node& node, CallList& calls) {
  std::optional<Shape> to = expand_target(node);
  // If the rule cannot know the sizes, those of the declared type are used.
  const Shape& sizes = to ? *to : known_shape(node, *node.outputs[0]);
  calls.add("aten::expand", "", {node.inputs[0], Arg::list(sizes), false}, {node.outputs[0]});
}

// ---- axes of channels-last images (ImageRule::rename_axes)

std::optional<RenamedAxes> rename_axis(const Node& node) {
  RenamedAxes renamed{.attrs = node.attrs};
  const int64_t axis = ir::int_attr(node.attrs, "axis", 0);
  renamed.attrs.insert_or_assign("axis", Dim(channels_last_axis(node, axis, rank(node))));
  return renamed;
}

// ---- Slice

struct SliceOfAxis {
  int64_t axis;
  Dim start, end;
  int64_t step;
};

std::vector<SliceOfAxis> slices(const Node& node) {
  const Shape starts = known_ints(&input(node, 1));
  const Shape ends = known_ints(&input(node, 2));
  if (starts.size() != ends.size()) {
    throw UserError(
        concat("Slice: ends: got ", ends.size(), ", want ", starts.size(), " as starts has"));
  }
  std::vector<int64_t> axes(starts.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (has_input(node, 3)) axes = wrap_axes(node, known_ints(node.inputs[3]), rank(node));
  const Shape steps =
      has_input(node, 4) ? known_ints(node.inputs[4]) : Shape(starts.size(), Dim(1));
  if (axes.size() != starts.size() || steps.size() != starts.size()) {
    throw UserError(concat("Slice: axes and steps: got ", axes.size(), " and ", steps.size(),
                           ", want ", starts.size(), " as starts has"));
  }
  std::vector<SliceOfAxis> result;
  for (size_t i = 0; i < starts.size(); ++i) {
    if (!steps[i].is_constant()) {
      throw Unsupported(concat("Slice: step: got '", steps[i].str(), "', want a constant"));
    }
    if (steps[i] == Dim(0)) throw UserError("Slice: step: got 0, want another number");
    result.push_back({axes[i], starts[i], ends[i], steps[i].constant()});
  }
  return result;
}

// A bound as a positive number within the axis. Nothing if its sign is not known.
std::optional<Dim> clamp_bound(const Dim& bound, const Dim& size) {
  if (bound == size) return size;
  if (!bound.is_constant()) {
    if (bound.is_symbol()) return Dim::make(DimOp::kMin, bound, size);
    return std::nullopt;
  }
  const int64_t at = bound.constant();
  if (at >= kFarEnd) return size;
  if (at <= -kFarEnd) return Dim(0);
  if (at == 0) return Dim(0);
  if (at > 0) return Dim::make(DimOp::kMin, at, size);
  return Dim::make(DimOp::kMax, plus(size, at), 0);
}

// The first element and the length of a slice with a negative step over an axis of known size.
std::pair<int64_t, int64_t> backward_slice(const SliceOfAxis& slice, int64_t size) {
  const auto wrapped = [size](int64_t at) { return at < 0 ? at + size : at; };
  const int64_t start = std::clamp<int64_t>(wrapped(slice.start.constant()), -1, size - 1);
  const int64_t far_end = slice.end.constant();
  const int64_t end =
      far_end <= -kFarEnd ? -1 : std::clamp<int64_t>(wrapped(far_end), -1, size - 1);
  const int64_t step = -slice.step;
  return {start, std::max<int64_t>(0, (start - end + step - 1) / step)};
}

// Whether a slice reverses the axis, whatever its size.
bool reverses_all(const SliceOfAxis& slice) {
  if (slice.step != -1 || !slice.start.is_constant() || !slice.end.is_constant()) return false;
  const int64_t start = slice.start.constant();
  return (start == -1 || start >= kFarEnd) && slice.end.constant() <= -kFarEnd;
}

bool is_backward_known(const SliceOfAxis& slice, const Dim& size) {
  return slice.start.is_constant() && slice.end.is_constant() && size.is_constant();
}

std::optional<Dim> sliced_dim(const SliceOfAxis& slice, const Dim& size) {
  if (reverses_all(slice)) return size;
  if (slice.step < 0) {
    if (!is_backward_known(slice, size)) return std::nullopt;
    return Dim(backward_slice(slice, size.constant()).second);
  }
  std::optional<Dim> start = clamp_bound(slice.start, size), end = clamp_bound(slice.end, size);
  if (!start || !end) return std::nullopt;
  Dim length = *start == Dim(0) ? *end : Dim::make(DimOp::kMax, minus(*end, *start), 0);
  return ceil_div(length, slice.step);
}

// The type of a slice along one axis.
Type sliced_type(const SliceOfAxis& slice, const Type& type) {
  if (!type.shape) return with_shape(type, std::nullopt);
  Shape shape = *type.shape;
  std::optional<Dim> dim = sliced_dim(slice, shape.at(slice.axis));
  if (!dim) return with_shape(type, std::nullopt);
  shape[slice.axis] = *dim;
  if (slice.step < 0) return with_shape(type, std::move(shape));
  Shape strides = strides_of(type);
  strides[slice.axis] = times(strides[slice.axis], slice.step);
  return view_type(type, std::move(shape), strides);
}

std::vector<Type> infer_slice(const Node& node) {
  for (size_t slot = 1; slot < node.inputs.size(); ++slot) {
    if (has_input(node, slot) && !has_known_ints(node.inputs[slot])) return unknown_shape(node);
  }
  if (!is_sized(node)) return unknown_shape(node);
  Type type = input(node, 0).type;
  for (const SliceOfAxis& slice : slices(node)) type = sliced_type(slice, type);
  return one(type);
}

void lower_slice(const Node& node, CallList& calls) {
  const std::vector<SliceOfAxis> all = slices(node);
  Value* x = node.inputs[0];
  if (all.empty()) {
    calls.add("aten::alias", "", {x}, {node.outputs[0]});
    return;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const SliceOfAxis& slice = all[i];
    const bool is_last = i + 1 == all.size();
    const Type type = sliced_type(slice, x->type);
    Value* result = is_last ? node.outputs[0] : calls.temporary(type);
    if (slice.step > 0) {
      // Both ONNX and the kernel clamp ends beyond the axis.
      calls.add("aten::slice", "Tensor", {x, slice.axis, slice.start, slice.end, slice.step},
                {result});
    } else if (reverses_all(slice)) {
      calls.add("aten::flip", "", {x, Arg::list(std::vector<int64_t>{slice.axis})}, {result});
    } else {
      const Dim& size = known_shape(node, *x)[slice.axis];
      if (!is_backward_known(slice, size)) {
        throw Unsupported(
            concat("Slice: step ", slice.step, ": got symbolic bounds, want constants"));
      }
      const auto [start, length] = backward_slice(slice, size.constant());
      const int64_t first = length == 0 ? 0 : start + (length - 1) * slice.step;
      const SliceOfAxis opposite = {slice.axis, first, length == 0 ? int64_t{0} : start + 1,
                                    -slice.step};
      Value* forward = calls.temporary(sliced_type(opposite, x->type));
      calls.add("aten::slice", "Tensor",
                {x, opposite.axis, opposite.start, opposite.end, opposite.step}, {forward});
      calls.add("aten::flip", "", {forward, Arg::list(std::vector<int64_t>{slice.axis})}, {result});
    }
    x = result;
  }
}

std::optional<RenamedAxes> rename_axes_of_slice(const Node& node) {
  if (!infer_slice(node)[0].shape) return std::nullopt;
  Shape axes;
  for (const SliceOfAxis& slice : slices(node)) {
    axes.push_back(channels_last_axis(node, slice.axis, rank(node)));
  }
  return RenamedAxes{.attrs = node.attrs, .ints = {{3, axes}}};
}

std::optional<RenamedAxes> rename_axes_of_slice_backward(const Node& node) {
  RenamedAxes renamed{.attrs = node.attrs};
  const int64_t axis = ir::int_attr(node.attrs, "dim", 0);
  const Shape sizes = ir::ints_attr(node.attrs, "input_sizes", {});
  if (!is_image_rank(sizes.size())) return std::nullopt;
  renamed.attrs.insert_or_assign("dim", Dim(channels_last_axis(node, axis, sizes.size())));
  renamed.attrs.insert_or_assign("input_sizes", channels_last_shape(sizes));
  return renamed;
}

// ---- Unsqueeze, Squeeze

Type unsqueezed_type(const Type& type, int64_t axis) {
  Shape shape = *type.shape, strides = strides_of(type);
  const auto at = static_cast<size_t>(axis);
  const Dim stride = at < shape.size() ? times(shape[at], strides[at]) : Dim(1);
  shape.insert(shape.begin() + axis, Dim(1));
  strides.insert(strides.begin() + axis, stride);
  return view_type(type, std::move(shape), strides);
}

std::vector<Type> infer_unsqueeze(const Node& node) {
  if (!is_sized(node) || !has_known_ints(&input(node, 1))) return unknown_shape(node);
  Shape shape = *input(node, 0).type.shape;
  const Shape given = known_ints(node.inputs[1]);
  std::vector<int64_t> axes =
      wrap_axes(node, given, static_cast<int64_t>(shape.size() + given.size()));
  std::sort(axes.begin(), axes.end());
  if (std::adjacent_find(axes.begin(), axes.end()) != axes.end()) {
    throw UserError(concat("Unsqueeze: axes: got ", ir::to_string(given), ", want each once"));
  }
  Type type = input(node, 0).type;
  for (int64_t axis : axes) type = unsqueezed_type(type, axis);
  return one(type);
}

void lower_unsqueeze(const Node& node, CallList& calls) {
  const Shape given = known_ints(&input(node, 1));
  Value* x = node.inputs[0];
  const auto size = static_cast<int64_t>(known_shape(node, *x).size() + given.size());
  std::vector<int64_t> axes = wrap_axes(node, given, size);
  std::sort(axes.begin(), axes.end());
  if (axes.empty()) calls.add("aten::alias", "", {x}, {node.outputs[0]});
  for (size_t i = 0; i < axes.size(); ++i) {
    const bool is_last = i + 1 == axes.size();
    Value* result = is_last ? node.outputs[0] : calls.temporary(unsqueezed_type(x->type, axes[i]));
    calls.add("aten::unsqueeze", "", {x, axes[i]}, {result});
    x = result;
  }
}

// The axes to drop; nothing if it is known only when the graph runs which dims are 1.
std::optional<std::vector<int64_t>> squeezed_axes(const Node& node) {
  if (has_input(node, 1)) return wrap_axes(node, known_ints(node.inputs[1]), rank(node));
  const Shape& shape = known_shape(node, input(node, 0));
  if (!ir::is_constant(shape)) return std::nullopt;
  std::vector<int64_t> axes;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == Dim(1)) axes.push_back(static_cast<int64_t>(i));
  }
  return axes;
}

std::vector<Type> infer_squeeze(const Node& node) {
  if (!is_sized(node) || (has_input(node, 1) && !has_known_ints(node.inputs[1])))
    return unknown_shape(node);
  const std::optional<std::vector<int64_t>> axes = squeezed_axes(node);
  if (!axes) return unknown_shape(node);
  const Type& type = input(node, 0).type;
  const Shape &from = *type.shape, old = strides_of(type);
  Shape shape, strides;
  for (size_t i = 0; i < from.size(); ++i) {
    const bool is_dropped =
        std::find(axes->begin(), axes->end(), static_cast<int64_t>(i)) != axes->end();
    if (!is_dropped) {
      shape.push_back(from[i]);
      strides.push_back(old[i]);
    } else if (from[i].is_constant() && from[i].constant() != 1) {
      throw UserError(concat("Squeeze: size of axis ", i, ": got ", from[i].str(), ", want 1"));
    }
  }
  return one(view_type(type, std::move(shape), strides));
}

void lower_squeeze(const Node& node, CallList& calls) {
  const std::optional<std::vector<int64_t>> axes = squeezed_axes(node);
  if (!axes) throw Unsupported("Squeeze: got no axes and symbolic sizes, want axes");
  if (axes->size() == 1) {
    calls.add("aten::squeeze", "dim", {node.inputs[0], (*axes)[0]}, {node.outputs[0]});
  } else {
    calls.add("aten::squeeze", "dims", {node.inputs[0], Arg::list(*axes)}, {node.outputs[0]});
  }
}

// ---- Split, Concat

int64_t split_axis(const Node& node) {
  return wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank(node));
}

Shape split_sizes(const Node& node) {
  const Dim& size = known_shape(node, input(node, 0))[split_axis(node)];
  if (has_input(node, 1)) {
    Shape sizes = known_ints(node.inputs[1]);
    Dim sum = 0;
    for (const Dim& part : sizes) sum = plus(sum, part);
    if (sum.is_constant() && size.is_constant()) same_dim(node, size, sum);
    return sizes;
  }
  const auto count = static_cast<int64_t>(node.outputs.size());
  const int64_t parts = ir::int_attr(node.attrs, "num_outputs", count);
  if (parts != count) {
    throw UserError(concat("Split: outputs: got ", count, ", want ", parts, " as num_outputs is"));
  }
  const Dim part = ceil_div(size, parts);
  Shape sizes(parts - 1, part);
  sizes.push_back(minus(size, times(part, parts - 1)));
  return sizes;
}

std::vector<Type> infer_split(const Node& node) {
  const Type& type = input(node, 0).type;
  if (!is_sized(node) || (has_input(node, 1) && !has_known_ints(node.inputs[1]))) {
    return std::vector<Type>(node.outputs.size(), with_shape(type, std::nullopt));
  }
  std::vector<Type> types;
  for (const Dim& part : split_sizes(node)) {
    Shape shape = *type.shape;
    shape[split_axis(node)] = part;
    types.push_back(view_type(type, std::move(shape), strides_of(type)));
  }
  if (types.size() < node.outputs.size()) {
    throw UserError(concat("Split: outputs: got ", node.outputs.size(), ", want ", types.size()));
  }
  types.resize(node.outputs.size());
  return types;
}

void lower_split(const Node& node, CallList& calls) {
  const Shape sizes = split_sizes(node);
  std::vector<Value*> outputs = node.outputs;
  outputs.resize(sizes.size(), nullptr);
  calls.add("aten::split_with_sizes", "", {node.inputs[0], Arg::list(sizes), split_axis(node)},
            outputs);
}

std::optional<RenamedAxes> rename_axis_of_split(const Node& node) {
  return infer_split(node)[0].shape ? rename_axis(node) : std::nullopt;
}

std::vector<Type> infer_concat(const Node& node) {
  if (!ir::has_attr(node.attrs, "axis")) throw UserError("Concat: axis is missing");
  const Type& first = input(node, 0).type;
  for (size_t slot = 0; slot < node.inputs.size(); ++slot) {
    const Type& type = input(node, slot).type;
    if (type.dtype != first.dtype) {
      throw UserError(concat("Concat: dtype of input ", slot, ": got ", ir::name(type.dtype),
                             ", want ", ir::name(first.dtype)));
    }
    if (!type.shape) return unknown_shape(node);
    if (type.shape->size() != first.shape->size()) {
      throw UserError(concat("Concat: shape of input ", slot, ": got ", ir::to_string(*type.shape),
                             ", want rank ", first.shape->size()));
    }
  }
  const int64_t axis = wrap_axis(node, ir::int_attr(node.attrs, "axis", 0), rank(node));
  Shape shape = *first.shape;
  for (size_t slot = 1; slot < node.inputs.size(); ++slot) {
    const Shape& other = *node.inputs[slot]->type.shape;
    for (size_t i = 0; i < shape.size(); ++i) {
      shape[i] = static_cast<int64_t>(i) == axis ? plus(shape[i], other[i])
                                                 : same_dim(node, shape[i], other[i]);
    }
  }
  return one(with_shape(first, std::move(shape)));
}

void lower_concat(const Node& node, CallList& calls) {
  // Negative axes count from the end in ONNX and in PyTorch.
  calls.add("aten::cat", "", {Arg::values(node.inputs), ir::int_attr(node.attrs, "axis", 0)},
            {node.outputs[0]});
}

// ---- Tile, Identity, Pad, Trilu

std::vector<Type> infer_tile(const Node& node) {
  if (!is_sized(node) || !has_known_ints(&input(node, 1))) return unknown_shape(node);
  const Shape repeats = known_ints(node.inputs[1]);
  Shape shape = *input(node, 0).type.shape;
  if (repeats.size() != shape.size()) {
    throw UserError(concat("Tile: repeats: got ", repeats.size(), ", want ", shape.size()));
  }
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = times(shape[i], repeats[i]);
  return one(with_shape(input(node, 0).type, std::move(shape)));
}

void lower_tile(const Node& node, CallList& calls) {
  calls.add("aten::repeat", "", {node.inputs[0], Arg::list(known_ints(&input(node, 1)))},
            {node.outputs[0]});
}

// A copy: readers may depend on its having memory of its own and row-major strides.
void lower_identity(const Node& node, CallList& calls) {
  calls.add("aten::clone", "", {node.inputs[0], "contiguous_format"}, {node.outputs[0]});
}

struct Padding {
  Dim before = 0, after = 0;
};

std::vector<Padding> paddings(const Node& node) {
  const Shape pads = known_ints(&input(node, 1));
  const int64_t size = rank(node);
  std::vector<int64_t> axes(size);
  std::iota(axes.begin(), axes.end(), 0);
  if (has_input(node, 3)) axes = wrap_axes(node, known_ints(node.inputs[3]), size);
  if (pads.size() != 2 * axes.size()) {
    throw UserError(concat("Pad: pads: got ", pads.size(), ", want ", 2 * axes.size()));
  }
  std::vector<Padding> all(size);
  for (size_t i = 0; i < axes.size(); ++i) all[axes[i]] = {pads[i], pads[axes.size() + i]};
  return all;
}

std::vector<Type> infer_pad(const Node& node) {
  if (!is_sized(node) || !has_known_ints(&input(node, 1)) ||
      (has_input(node, 3) && !has_known_ints(node.inputs[3]))) {
    return unknown_shape(node);
  }
  Shape shape = *input(node, 0).type.shape;
  const std::vector<Padding> all = paddings(node);
  for (size_t i = 0; i < shape.size(); ++i)
    shape[i] = plus(plus(shape[i], all[i].before), all[i].after);
  return one(with_shape(input(node, 0).type, std::move(shape)));
}

void lower_pad(const Node& node, CallList& calls) {
  const std::string mode = ir::string_attr(node.attrs, "mode", "constant");
  if (mode != "constant") throw Unsupported(concat("Pad: mode: got '", mode, "', want 'constant'"));
  Arg value = 0;
  if (has_input(node, 2)) {
    std::optional<Arg> known = known_number(node.inputs[2]);
    if (!known)
      throw Unsupported(
          concat("Pad: value '", node.inputs[2]->name, "' depends on data, want a constant"));
    value = *known;
  }
  std::vector<Padding> all = paddings(node);
  // PyTorch lists the padding of the last axis first, and may leave out the first axes.
  Shape pads;
  for (auto pad = all.rbegin(); pad != all.rend(); ++pad) {
    pads.push_back(pad->before);
    pads.push_back(pad->after);
  }
  while (pads.size() >= 2 && pads.back() == Dim(0) && pads[pads.size() - 2] == Dim(0)) {
    pads.resize(pads.size() - 2);
  }
  calls.add("aten::constant_pad_nd", "", {node.inputs[0], Arg::list(pads), value},
            {node.outputs[0]});
}

std::optional<RenamedAxes> rename_axes_of_pad(const Node& node) {
  if (!infer_pad(node)[0].shape) return std::nullopt;
  const std::vector<Padding> all = paddings(node);
  Shape pads, after;
  const auto num_dims = static_cast<int64_t>(all.size());
  for (const Dim& axis : to_last(all.size())) {
    pads.push_back(all[axis.constant()].before);
    after.push_back(all[axis.constant()].after);
  }
  pads.insert(pads.end(), after.begin(), after.end());
  RenamedAxes renamed{.attrs = node.attrs, .ints = {{1, pads}}};
  // The node may have named only a few axes; now it names all.
  if (has_input(node, 3)) {
    Shape& axes = renamed.ints[3];
    for (int64_t axis = 0; axis < num_dims; ++axis) axes.push_back(axis);
  }
  return renamed;
}

void lower_trilu(const Node& node, CallList& calls) {
  Arg diagonal = 0;
  if (has_input(node, 1)) {
    std::optional<Arg> known = known_number(node.inputs[1]);
    if (!known)
      throw Unsupported(
          concat("Trilu: diagonal '", node.inputs[1]->name, "' depends on data, want a constant"));
    diagonal = *known;
  }
  const bool upper = ir::int_attr(node.attrs, "upper", 1) != 0;
  calls.add(upper ? "aten::triu" : "aten::tril", "", {node.inputs[0], diagonal}, {node.outputs[0]});
}

// ---- Shape, Dims

Type int64_vector(int64_t size) {
  Type type;
  type.dtype = ir::DType::kInt64;
  type.shape = Shape{size};
  return type;
}

// Sizes as a tensor. Usually only rules and lowerings read them, and then no kernel runs.
void make_ints(const Node& node, const Shape& dims, CallList& calls) {
  if (!is_read_as_tensor(*node.outputs[0])) return;
  std::vector<Value*> parts;
  for (const Dim& dim : dims) {
    parts.push_back(calls.temporary(int64_vector(1)));
    calls.add("aten::full", "",
              {Arg::list(std::vector<int64_t>{1}), dim, "int64", Arg(), "cpu", Arg()},
              {parts.back()});
  }
  if (parts.empty()) {
    calls.add("aten::full", "",
              {Arg::list(std::vector<int64_t>{0}), 0, "int64", Arg(), "cpu", Arg()},
              {node.outputs[0]});
  } else {
    calls.add("aten::cat", "", {Arg::values(parts), 0}, {node.outputs[0]});
  }
}

std::vector<Type> infer_shape(const Node& node) {
  Type type = int64_vector(0);
  if (is_sized(node))
    type.shape = Shape{static_cast<int64_t>(part_of_shape(node).size())};
  else
    type.shape.reset();
  return one(type);
}

void lower_shape(const Node& node, CallList& calls) { make_ints(node, part_of_shape(node), calls); }

int shape_since(const Node& node) {
  return ir::has_attr(node.attrs, "start") || ir::has_attr(node.attrs, "end") ? 15 : 1;
}

std::vector<Type> infer_dims(const Node& node) {
  return one(int64_vector(static_cast<int64_t>(ir::ints_attr(node.attrs, "dims", {}).size())));
}

void lower_dims(const Node& node, CallList& calls) {
  make_ints(node, ir::ints_attr(node.attrs, "dims", {}), calls);
}

int split_since(const Node& node) { return ir::has_attr(node.attrs, "num_outputs") ? 18 : 13; }
int pad_since(const Node& node) {
  if (node.inputs.size() > 3) return 18;
  return input(node, 0).type.dtype == ir::DType::kBool ? 13 : 11;
}

Op op(std::string name, int inputs, int since, InferRule infer, Lowering lower) {
  Op op;
  op.name = std::move(name);
  op.min_inputs = inputs;
  op.max_inputs = inputs;
  op.since = since;
  op.infer = infer;
  op.lower = lower;
  return op;
}

// Concatenations of parts with equal sizes, because one region computes all of them.
FusedForm fused_concat(const Node& node) {
  const Type& first = node.inputs[0]->type;
  const bool are_equal =
      std::all_of(node.inputs.begin(), node.inputs.end(), [&](const Value* value) {
        return value != nullptr && value->type.dtype == first.dtype &&
               *value->type.shape == *first.shape;
      });
  if (!are_equal || node.inputs.size() < 2) return {};
  const bool is_known = ir::is_float(first.dtype) || first.dtype == ir::DType::kBool;
  return is_known ? FusedForm{Kind::kConcat} : FusedForm();
}

Op view(std::string name, int inputs, int since, InferRule infer, Lowering lower) {
  Op result = op(std::move(name), inputs, since, infer, lower);
  result.view = true;
  if (inputs == 2) result.int_inputs = {1};
  return result;
}

}  // namespace

Shape part_of_shape(const Node& node) {
  const Shape& shape = known_shape(node, input(node, 0));
  const auto size = static_cast<int64_t>(shape.size());
  const auto bound = [&](const char* name, int64_t missing) {
    const int64_t at = ir::int_attr(node.attrs, name, missing);
    return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size);
  };
  const int64_t start = bound("start", 0), end = bound("end", size);
  return start < end ? Shape(shape.begin() + start, shape.begin() + end) : Shape();
}

void register_shape(Registry& ops) {
  Op reshape = view("Reshape", 2, 5, infer_reshape, lower_reshape);
  reshape.attributes = {{"allowzero", kInt}};
  reshape.since_of = reshape_since;
  reshape.work = {.keeps_elements = true, .fused = Kind::kPass};
  ops.add(reshape);
  Op flatten = view("Flatten", 1, 11, infer_flatten, lower_flatten);
  flatten.attributes = {{"axis", kInt}};
  flatten.work.keeps_elements = true;
  ops.add(flatten);
  Op transpose = view("Transpose", 1, 1, infer_transpose, lower_transpose);
  transpose.attributes = {{"perm", kInts}};
  ops.add(transpose);
  Op expand = view("Expand", 2, 8, infer_expand, lower_expand);
  expand.work.image.kind = ImageForm::Kind::kExpand;
  ops.add(expand);

  Op slice = view("Slice", 3, 10, infer_slice, lower_slice);
  slice.max_inputs = 5;
  slice.int_inputs = {1, 2, 3, 4};
  slice.work.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_axes_of_slice};
  ops.add(slice);

  Op unsqueeze = view("Unsqueeze", 2, 13, infer_unsqueeze, lower_unsqueeze);
  unsqueeze.work = {.keeps_elements = true, .fused = Kind::kPass};
  ops.add(unsqueeze);
  Op squeeze = view("Squeeze", 2, 13, infer_squeeze, lower_squeeze);
  squeeze.min_inputs = 1;
  squeeze.work = {.keeps_elements = true, .fused = Kind::kPass};
  ops.add(squeeze);

  Op split = view("Split", 2, 13, infer_split, lower_split);
  split.min_inputs = 1;
  split.max_outputs = -1;
  split.attributes = {{"axis", kInt}, {"num_outputs", kInt}};
  split.since_of = split_since;
  split.work.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_axis_of_split};
  ops.add(split);

  Op cat = op("Concat", 1, 11, infer_concat, lower_concat);
  cat.max_inputs = -1;
  cat.attributes = {{"axis", kInt, true}};
  cat.work.fused = fused_concat;
  cat.work.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_axis};
  ops.add(cat);

  Op tile = op("Tile", 2, 6, infer_tile, lower_tile);
  tile.int_inputs = {1};
  ops.add(tile);
  Op identity = op("Identity", 1, 1, infer_like_first, lower_identity);
  identity.work = {.elementwise = true, .keeps_elements = true, .fused = Kind::kPass};
  ops.add(identity);

  Op pad = op("Pad", 2, 11, infer_pad, lower_pad);
  pad.max_inputs = 4;
  pad.attributes = {{"mode", kString}};
  pad.int_inputs = {1, 3};
  pad.since_of = pad_since;
  pad.work.image = {.kind = ImageForm::Kind::kAxes, .rename_axes = rename_axes_of_pad};
  ops.add(pad);

  Op trilu = op("Trilu", 1, 14, infer_like_first, lower_trilu);
  trilu.max_inputs = 2;
  trilu.attributes = {{"upper", kInt}};
  trilu.bfloat16_since = 14;
  ops.add(trilu);

  Op shape = op("Shape", 1, 1, infer_shape, lower_shape);
  shape.attributes = {{"end", kInt}, {"start", kInt}};
  shape.since_of = shape_since;
  ops.add(shape);

  Op dims = op("Dims", 0, 1, infer_dims, lower_dims);
  dims.domain = ir::kTorchOrtDomain;
  dims.attributes = {{"dims", kDims}};
  ops.add(dims);

  for (const char* name : {"aten::_unsafe_view", "aten::unsafe_chunk", "aten::unsafe_split",
                           "aten::unsafe_split_with_sizes"}) {
    ops.add(Operator{.name = name, .gives_view = true});
  }
  ops.add(Operator{.name = "aten::as_strided", .names_strides = true});
  ops.add(Operator{.name = "aten::reshape", .view_or_copy = true});
  ops.add(Operator{.name = "aten::select_backward", .is_placeable = true});
  ops.add(Operator{
      .name = aten::kSliceBackward,
      .work = {.image = {.kind = ImageForm::Kind::kAxes,
                         .rename_axes = rename_axes_of_slice_backward}},
      .is_placeable = true,
  });
}

}  // namespace torch_ort::ops
