// Views, joins, copies and padding.

#include "convert/families.h"
#include "convert/rows.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::Shape;
using ir::Type;
using ir::Value;
using Values = std::vector<Value*>;

constexpr int64_t kToTheEnd = std::numeric_limits<int64_t>::max();

// The tensor that a call views; nothing if its shape or that of a result is not known.
Value* viewed(const AtenCall& call, std::string_view name = "self") {
  Value* x = tensor(call.arg(name));
  if (x == nullptr || !x->type.shape) return nullptr;
  const bool all_known = std::all_of(call.types.begin(), call.types.end(),
                                     [](const Type& type) { return type.is_known(); });
  return all_known ? x : nullptr;
}

// A reshape to the shape of the type.
Values reshape_to_type(Builder& builder, Value* x, const Type& type) {
  const Shape& shape = *type.shape;
  // In a Reshape, 0 means the size of the input unless `allowzero` is set.
  const bool has_zero = std::find(shape.begin(), shape.end(), Dim(0)) != shape.end();
  if (!can_use(builder, "Reshape", type.dtype) || (has_zero && !builder.allows(14))) return {};
  ir::Attrs attrs;
  if (has_zero) attrs["allowzero"] = Dim(1);
  return builder.node("Reshape", {x, builder.ints(shape)}, {type}, std::move(attrs));
}

Values reshape(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr) return {};
  return reshape_to_type(builder, x, call.types[0]);
}

// The results of these calls are views, although their schemas do not say so. If there is no
// standard node, another ATen operator whose schema does say so is called.
template <Values (*kRow)(Builder&, const AtenCall&)>
Row open_view(std::string op) {
  return [op = std::move(op)](Builder& builder, const AtenCall& call) {
    Values values = kRow(builder, call);
    if (!values.empty()) return values;
    AtenCall open = call;
    open.op = op;
    return convert_to_aten(builder, open);
  };
}

Values transpose_by(Builder& builder, const AtenCall& call, Value* x, const Shape& order) {
  if (!can_use(builder, "Transpose", x->type.dtype)) return {};
  return builder.node("Transpose", {x}, call.types, {{"perm", order}});
}

Shape identity_order(size_t rank) {
  Shape order;
  for (size_t i = 0; i < rank; ++i) order.push_back(static_cast<int64_t>(i));
  return order;
}

Values transpose_matrix(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->size() != 2) return {};
  return transpose_by(builder, call, x, {1, 0});
}

Values transpose_two(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->empty()) return {};
  Shape order = identity_order(x->type.shape->size());
  std::swap(order[axis(call, "dim0", order.size())], order[axis(call, "dim1", order.size())]);
  return transpose_by(builder, call, x, order);
}

Values permute(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->empty()) return {};
  Shape order = dims(call.arg("dims"));
  for (Dim& at : order) {
    if (at.constant() < 0) at = at.constant() + static_cast<int64_t>(order.size());
  }
  return transpose_by(builder, call, x, order);
}

Values expand(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || !can_use(builder, "Expand", x->type.dtype)) return {};
  return builder.node("Expand", {x, builder.ints(*call.types[0].shape)}, call.types);
}

Value* slice_node(Builder& builder, Value* x, int64_t axis, const Dim& start, const Dim& end,
                  int64_t step, const Type& type) {
  Values inputs = {x, builder.ints({start}), builder.ints({end}), builder.ints({axis})};
  if (step != 1) inputs.push_back(builder.ints({step}));
  return builder.node1("Slice", std::move(inputs), type);
}

Values slice(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || !can_use(builder, "Slice", x->type.dtype)) return {};
  const auto bound = [&](std::string_view name, int64_t missing) {
    return call.arg(name).is_none() ? std::optional<Dim>(missing) : dim(call.arg(name));
  };
  const std::optional<Dim> start = bound("start", 0), end = bound("end", kToTheEnd);
  const std::optional<Dim> step = dim(call.arg("step"));
  if (!start || !end || !step || !step->is_constant()) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  return {slice_node(builder, x, at, *start, *end, step->constant(), call.types[0])};
}

Value* select_node(Builder& builder, Value* x, int64_t axis, int64_t position, const Type& type) {
  Value* index = builder.scalar(static_cast<double>(position), ir::DType::kInt64);
  return builder.node1("Gather", {x, index}, type, {{"axis", Dim(axis)}});
}

Values select(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  const std::optional<Dim> position = dim(call.arg("index"));
  if (x == nullptr || !position || !position->is_constant()) return {};
  if (!can_use(builder, "Gather", x->type.dtype)) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  return {select_node(builder, x, at, position->constant(), call.types[0])};
}

// One view for each result that is read.
Values unbind(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || !can_use(builder, "Gather", x->type.dtype)) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  Values results;
  for (size_t i = 0; i < call.types.size(); ++i) {
    results.push_back(call.used[i]
                          ? select_node(builder, x, at, static_cast<int64_t>(i), call.types[i])
                          : nullptr);
  }
  return results;
}

Values split(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || call.types.empty()) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  Shape sizes;
  for (const Type& type : call.types) sizes.push_back((*type.shape)[at]);
  if (can_use(builder, "Split", x->type.dtype)) {
    return builder.node("Split", {x, builder.ints(sizes)}, call.types, {{"axis", Dim(at)}});
  }
  if (!can_use(builder, "Slice", x->type.dtype)) return {};
  Values results;
  Dim start = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const Dim end = Dim::make(ir::DimOp::kAdd, start, sizes[i]);
    results.push_back(call.used[i] ? slice_node(builder, x, at, start, end, 1, call.types[i])
                                   : nullptr);
    start = end;
  }
  return results;
}

Values unsqueeze(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr) return {};
  if (!can_use(builder, "Unsqueeze", x->type.dtype))
    return reshape_to_type(builder, x, call.types[0]);
  const int64_t at = axis(call, "dim", call.types[0].shape->size());
  return builder.node("Unsqueeze", {x, builder.ints({at})}, call.types);
}

Values squeeze_axes(Builder& builder, const AtenCall& call, Value* x,
                    const std::vector<int64_t>& given) {
  const Shape& shape = *x->type.shape;
  Shape axes;
  for (int64_t at : given) {
    const int64_t from_front = at < 0 ? at + static_cast<int64_t>(shape.size()) : at;
    if (shape[from_front] == Dim(1)) axes.push_back(from_front);
  }
  // There is nothing to drop, so the ATen call returns the same tensor.
  if (axes.empty() || call.types[0].shape->size() + axes.size() != shape.size()) return {};
  if (!can_use(builder, "Squeeze", x->type.dtype))
    return reshape_to_type(builder, x, call.types[0]);
  return builder.node("Squeeze", {x, builder.ints(axes)}, call.types);
}

Values squeeze_one(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->empty()) return {};
  return squeeze_axes(builder, call, x, {integer(call.arg("dim"))});
}

Values squeeze_some(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->empty()) return {};
  std::vector<int64_t> axes;
  for (const Dim& at : dims(call.arg("dim"))) axes.push_back(at.constant());
  return squeeze_axes(builder, call, x, axes);
}

Values squeeze_all(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.shape->empty()) return {};
  std::vector<int64_t> axes(x->type.shape->size());
  std::iota(axes.begin(), axes.end(), 0);
  return squeeze_axes(builder, call, x, axes);
}

// PyTorch ignores vectors without elements, whatever the rank of the other parts is. Caches often
// begin as one.
bool is_passed_over(const Value& part, const Type& result) {
  const Shape& shape = *part.type.shape;
  return shape == Shape{0} && result.shape->size() != 1;
}

Values cat(Builder& builder, const AtenCall& call) {
  const Type& type = call.types[0];
  if (!type.is_known() || !can_use(builder, "Concat", type.dtype)) return {};
  Values inputs;
  for (const ops::Arg& item : std::get<ops::ArgList>(call.arg("tensors").value)) {
    Value* x = tensor(item);
    // PyTorch would promote dtypes.
    if (x == nullptr || x->type.dtype != type.dtype || !x->type.shape) return {};
    if (is_passed_over(*x, type)) continue;
    if (x->type.shape->size() != type.shape->size()) return {};
    inputs.push_back(x);
  }
  if (inputs.size() == 1 && can_use(builder, "Identity", type.dtype)) {
    return builder.node("Identity", inputs, call.types);
  }
  const int64_t at = axis(call, "dim", type.shape->size());
  return builder.node("Concat", inputs, call.types, {{"axis", Dim(at)}});
}

// Parts of equal sizes, concatenated along a new axis.
Values stack(Builder& builder, const AtenCall& call) {
  const Type& type = call.types[0];
  if (!type.is_known() || !can_use(builder, "Concat", type.dtype)) return {};
  if (!can_use(builder, "Unsqueeze", type.dtype)) return {};
  const int64_t at = axis(call, "dim", type.shape->size());
  Values inputs;
  for (const ops::Arg& item : std::get<ops::ArgList>(call.arg("tensors").value)) {
    Value* x = tensor(item);
    if (x == nullptr || x->type.dtype != type.dtype || !x->type.shape) return {};
    inputs.push_back(x);
  }
  for (Value*& x : inputs) x = builder.make("Unsqueeze", {x, builder.ints({at})});
  return builder.node("Concat", inputs, call.types, {{"axis", Dim(at)}});
}

Values repeat(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || !can_use(builder, "Tile", x->type.dtype)) return {};
  const Shape repeats = dims(call.arg("repeats"));
  if (repeats.size() != x->type.shape->size() || repeats.empty()) return {};
  return builder.node("Tile", {x, builder.ints(repeats)}, call.types);
}

Values clone(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || !can_use(builder, "Identity", x->type.dtype)) return {};
  if (!is_row_major(call.types[0])) return {};
  return builder.node("Identity", {x}, call.types);
}

Values constant_pad(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  if (x == nullptr || x->type.dtype == ir::DType::kBool) return {};
  if (!can_use(builder, "Pad", x->type.dtype) || !is_number(call.arg("value"))) return {};
  const Shape given = dims(call.arg("pad"));
  const size_t rank = x->type.shape->size();
  if (given.size() > 2 * rank) return {};
  Shape pads(2 * rank, Dim(0));
  for (size_t i = 0; i < given.size() / 2; ++i) {
    pads[rank - 1 - i] = given[2 * i];
    pads[2 * rank - 1 - i] = given[2 * i + 1];
  }
  Value* outside = builder.scalar(number(call.arg("value")), x->type.dtype);
  if (outside == nullptr) return {};
  return builder.node("Pad", {x, builder.ints(pads), outside}, call.types);
}

template <bool kUpper>
Values triangle(Builder& builder, const AtenCall& call) {
  Value* x = viewed(call);
  const std::optional<Dim> diagonal = dim(call.arg("diagonal"));
  if (x == nullptr || !diagonal || !diagonal->is_constant()) return {};
  if (!can_use(builder, "Trilu", x->type.dtype)) return {};
  Values inputs = {x};
  if (diagonal->constant() != 0) {
    inputs.push_back(builder.scalar(static_cast<double>(diagonal->constant()), ir::DType::kInt64));
  }
  return builder.node("Trilu", inputs, call.types, {{"upper", Dim(kUpper ? 1 : 0)}});
}

}  // namespace

void add_shape(Table& table) {
  table.add("aten::view", reshape);
  table.add("aten::_unsafe_view", open_view<reshape>("aten::view"));
  table.add("aten::reshape", reshape);
  table.add("aten::t", transpose_matrix);
  table.add("aten::transpose.int", transpose_two);
  table.add("aten::permute", permute);
  table.add("aten::expand", expand);
  table.add("aten::slice.Tensor", slice);
  table.add("aten::select.int", select);
  table.add("aten::unbind.int", unbind);
  table.add("aten::split.Tensor", split);
  table.add("aten::split_with_sizes", split);
  table.add("aten::unsafe_split.Tensor", open_view<split>("aten::split"));
  table.add("aten::unsafe_split_with_sizes", open_view<split>("aten::split_with_sizes"));
  table.add("aten::unsqueeze", unsqueeze);
  table.add("aten::squeeze.dim", squeeze_one);
  table.add("aten::squeeze.dims", squeeze_some);
  table.add("aten::squeeze", squeeze_all);
  table.add("aten::cat", cat);
  table.add("aten::stack", stack);
  table.add("aten::repeat", repeat);
  table.add("aten::clone", clone);
  table.add("aten::constant_pad_nd", constant_pad);
  table.add("aten::tril", triangle<false>);
  table.add("aten::triu", triangle<true>);
}

}  // namespace torch_ort::convert
