// ATen nodes in the words of older opsets, or with sizes among their numbers.
#include "base/error.h"
#include "convert/portable.h"
#include "convert/rows.h"
#include "ir/edit.h"
#include "ops/activation.h"
#include "ops/aten.h"
#include "ops/formula.h"
#include "ops/normalization.h"
#include "ops/shapes.h"
#include "ops/softmax.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::DType;
using ir::Shape;
using ir::Type;
using ir::Value;
using Values = std::vector<Value*>;

// A formula of a call, with casts, sizes and views, which calls need as well.
class Formula : public ops::Formula {
 public:
  explicit Formula(Builder& builder, DType dtype = DType::kFloat)
      : ops::Formula(builder, dtype, ops::Reader::kFile), builder_(builder) {}

  Value* cast(Value* x, DType dtype) { return builder_.cast(x, dtype); }
  // A size as a 0-d tensor.
  Value* size(const Dim& dim) {
    if (!dim.is_constant()) return reshape(builder_.ints({dim}), {});
    return builder_.scalar(static_cast<double>(dim.constant()), DType::kInt64);
  }
  Value* reshape(Value* x, const Shape& shape) { return builder_.reshape(x, shape); }

 private:
  Builder& builder_;
};

bool is_known_float(const Value* x) {
  return x != nullptr && is_float(x->type.dtype) && x->type.shape.has_value();
}

Shape last_axes(const Value* x, size_t count) {
  Shape axes;
  const size_t rank = x->type.shape->size();
  for (size_t axis = rank - count; axis < rank; ++axis) axes.push_back(static_cast<int64_t>(axis));
  return axes;
}

// ---- activations

using PointwiseFormula = Value* (*)(ops::Formula& f, Value* x);

Values pointwise(Builder& builder, const AtenCall& call, PointwiseFormula formula) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !is_float(x->type.dtype)) return {};
  Formula f(builder, x->type.dtype);
  return {f.cast(formula(f, f.number(x)), x->type.dtype)};
}

template <PointwiseFormula kFormula>
Values activation(Builder& builder, const AtenCall& call) {
  return pointwise(builder, call, kFormula);
}

Value* rsqrt(ops::Formula& f, Value* x) { return f.rsqrt(x); }

Values gelu(Builder& builder, const AtenCall& call) {
  const bool is_tanh = text(call.arg("approximate"), "none") == "tanh";
  return pointwise(builder, call, is_tanh ? ops::gelu_tanh : ops::gelu);
}

// ---- softmax

template <Value* (*kFormula)(ops::Formula& f, Value* x, const Shape& axes)>
Values softmax(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (!is_known_float(x) || x->type.shape->empty()) return {};
  Formula f(builder, x->type.dtype);
  const Shape axes = {axis(call, "dim", x->type.shape->size())};
  return {f.cast(kFormula(f, x, axes), call.types[0].dtype)};
}

// ---- norms

Values layer_norm(Builder& builder, const AtenCall& call) {
  Value* input = tensor(call.arg("input"));
  const size_t count = dims(call.arg("normalized_shape")).size();
  if (!is_known_float(input) || count > input->type.shape->size() || call.used[1] || call.used[2]) {
    return {};
  }
  Formula f(builder, input->type.dtype);
  const ops::LayerNorm norm =
      ops::layer_norm(f, input, last_axes(input, count), number(call.arg("eps")),
                      tensor(call.arg("weight")), tensor(call.arg("bias")));
  return {f.cast(norm.result, input->type.dtype), nullptr, nullptr};
}

// ---- attention

Value* range(Formula& f, const Dim& size) {
  Value* numbers = f.make("Range", {f.size(0), f.size(size), f.size(1)});
  numbers->type.shape = Shape{size};
  return numbers;
}

// Scores with minus infinity where a key comes after its query.
Value* causal(Formula& f, Value* scores, const Dim& queries, const Dim& keys) {
  Value* allowed =
      f.make("Less", {range(f, keys), f.reshape(f.add(range(f, queries), f.size(1)), {-1, 1})});
  return f.make("Where", {allowed, scores, f.constant(-std::numeric_limits<double>::infinity())});
}

Values attention(Builder& builder, const AtenCall& call) {
  const Value *query = tensor(call.arg("query")), *key = tensor(call.arg("key"));
  const Value* value = tensor(call.arg("value"));
  for (const Value* x : {query, key, value}) {
    if (!is_known_float(x) || x->type.shape->size() != 4) return {};
  }
  const Shape &of_query = *query->type.shape, &of_key = *key->type.shape;
  const ops::Arg &dropout = call.arg("dropout_p"), &scale = call.arg("scale");
  if (call.used[1] || !(of_query[1] == of_key[1]) || !of_query[3].is_constant()) return {};
  if (!is_number(dropout) || number(dropout) != 0.0) return {};
  if (!scale.is_none() && !is_number(scale)) return {};

  Formula f(builder, query->type.dtype);
  const auto features = static_cast<double>(of_query[3].constant());
  const double factor = scale.is_none() ? 1 / std::sqrt(features) : number(scale);
  Value* q = f.scaled(f.number(tensor(call.arg("query"))), factor);
  Value* k = builder.transpose(f.number(tensor(call.arg("key"))), {0, 1, 3, 2});
  Value* scores = f.make("MatMul", {q, k});
  if (Value* mask = tensor(call.arg("attn_mask"))) scores = f.add(scores, f.number(mask));
  if (boolean(call.arg("is_causal"))) scores = causal(f, scores, of_query[2], of_key[2]);
  Value* weights = ops::softmax(f, scores, {3});
  Value* result = f.make("MatMul", {weights, f.number(tensor(call.arg("value")))});
  return {f.cast(result, query->type.dtype), nullptr};
}

// The memory format is left out, since files have no layouts.
Values clone(Builder& builder, const AtenCall& call) {
  return {Formula(builder).make("Identity", {tensor(call.arg("self"))})};
}

// Indices along the first dims, as one index along a single dim in their place.
Values index(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  const auto& indices = std::get<ops::ArgList>(call.arg("indices").value);
  const auto is_place = [](const ops::Arg& index) {
    const Value* value = tensor(index);
    return value != nullptr && value->type.dtype == DType::kInt64;
  };
  if (!x->type.shape || indices.empty() || !std::all_of(indices.begin(), indices.end(), is_place))
    return {};
  Formula f(builder);
  const Shape& shape = *x->type.shape;
  Value* place = nullptr;
  for (size_t i = 0; i < indices.size(); ++i) {
    // Negative indices count from the end; the result of Mod has the sign of the divisor.
    Value* next = f.make("Mod", {tensor(indices[i]), f.size(shape[i])});
    place = place == nullptr ? next : f.add(f.mul(place, f.size(shape[i])), next);
  }
  Shape joined(shape.begin() + static_cast<int64_t>(indices.size()), shape.end());
  joined.insert(joined.begin(), -1);
  return {f.make("Gather", {f.reshape(x, joined), place}, {{"axis", Dim(0)}})};
}

Values cumsum(Builder& builder, const AtenCall& call) {
  Formula f(builder);
  Value* x = f.cast(tensor(call.arg("self")), call.types[0].dtype);
  if (!x->type.shape || x->type.shape->empty()) return {};
  return {f.make("CumSum", {x, f.size(axis(call, "dim", x->type.shape->size()))})};
}

// ---- sizes as numbers

Values arange(Builder& builder, const AtenCall& call) {
  Formula f(builder);
  Values bounds;
  for (const char* name : {"start", "end", "step"}) {
    const bool is_given =
        std::find(call.arg_names.begin(), call.arg_names.end(), name) != call.arg_names.end();
    const std::optional<Dim> bound =
        is_given ? dim(call.arg(name)) : Dim(name == std::string_view("step") ? 1 : 0);
    if (!bound) return {};
    bounds.push_back(f.size(*bound));
  }
  return {f.cast(f.make("Range", bounds), call.types[0].dtype)};
}

Values scalar_tensor(Builder& builder, const AtenCall& call) {
  const std::optional<Dim> size = dim(call.arg("s"));
  Formula f(builder);
  return size ? Values{f.cast(f.size(*size), call.types[0].dtype)} : Values();
}

// ---- operands of one dtype

bool is_arithmetic(const AtenCall& call) {
  static const std::set<std::string> keys = {"aten::add.Tensor", "aten::div.Tensor",
                                             "aten::maximum",    "aten::minimum",
                                             "aten::mul.Tensor", "aten::sub.Tensor"};
  return keys.contains(call.key());
}

// Applies a row of the common table, with tensors in place of sizes. Operands of arithmetic are
// cast to the dtype that PyTorch promotes them to.
Values by_row(Builder& builder, const AtenCall& call, const c10::FunctionSchema& schema) {
  const Row* row = table().find(call.key());
  if (row == nullptr || call.types.size() != 1) return {};
  AtenCall changed = call;
  const DType dtype = call.types[0].dtype;
  Formula f(builder);
  bool is_changed = false;
  for (size_t i = 0; i < call.args.size(); ++i) {
    if (schema.arguments()[i].type()->kind() != c10::TypeKind::TensorType) continue;
    Value* x = tensor(call.args[i]);
    const std::optional<Dim> size = dim(call.args[i]);
    const bool is_size = size && !size->is_constant();
    if (is_size) x = f.size(*size);
    const bool is_other = x != nullptr && x->type.dtype != dtype && is_arithmetic(call);
    if (!is_size && !is_other) continue;
    changed.args[i] = f.cast(x, dtype);
    is_changed = true;
  }
  return is_changed ? apply(*row, builder, changed) : Values();
}

// The larger, or smaller, of numbers and a bound for each.
template <bool kLargest>
Values bounded(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *bound = tensor(call.arg(kLargest ? "min" : "max"));
  if (x == nullptr || bound == nullptr) return {};
  const DType dtype = call.types[0].dtype;
  Formula f(builder);
  return {f.make(kLargest ? "Max" : "Min", {f.cast(x, dtype), f.cast(bound, dtype)})};
}

// Whether any element is not 0, or all of them are. For no elements the first is false and the
// second true.
template <bool kAll>
Values count_true(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.is_known() || !call.types[0].shape) return {};
  Shape axes = last_axes(x, x->type.shape->size());
  if (call.overload == "dim") axes = {axis(call, "dim", x->type.shape->size())};
  Formula f(builder);
  Value* counted = f.cast(x, DType::kBool);
  if (kAll) counted = f.make("Not", {counted});
  counted = builder.reduce("ReduceSum", f.cast(counted, DType::kInt64), axes, true);
  counted = f.reshape(counted, *call.types[0].shape);
  return {f.make(kAll ? "Equal" : "Greater", {counted, builder.scalar(0, DType::kInt64)})};
}

Values floor_quotient(Builder& builder, const AtenCall& call) {
  Value *a = tensor(call.arg("self")), *b = tensor(call.arg("other"));
  const DType dtype = call.types[0].dtype;
  const bool fits = a != nullptr && b != nullptr && a->type.dtype == dtype &&
                    b->type.dtype == dtype && text(call.arg("rounding_mode")) == "floor";
  if (!fits) return {};
  Formula f(builder);
  if (is_float(dtype)) return {f.make("Floor", {f.make("Div", {a, b})})};
  // Div rounds towards zero. Without the remainder the quotient is exact.
  return {f.make("Div", {f.sub(a, f.make("Mod", {a, b})), b})};
}

// ---- orders and places

Values ordered(Builder& builder, const AtenCall& call, const Dim& count, bool is_largest) {
  Value* x = tensor(call.arg("self"));
  const Shape& shape = *x->type.shape;
  if (shape.empty() || !ir::is_number(x->type.dtype) || !builder.allows(11)) return {};
  const int64_t at = axis(call, "dim", shape.size());
  return builder.node("TopK", {x, builder.ints({count})}, call.types,
                      {{"axis", Dim(at)}, {"largest", Dim(is_largest ? 1 : 0)}});
}

Values sort(Builder& builder, const AtenCall& call) {
  const Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.shape || x->type.shape->empty()) return {};
  const Shape& shape = *x->type.shape;
  return ordered(builder, call, shape[axis(call, "dim", shape.size())],
                 boolean(call.arg("descending")));
}

Values top(Builder& builder, const AtenCall& call) {
  const Value* x = tensor(call.arg("self"));
  const std::optional<Dim> count = dim(call.arg("k"));
  if (x == nullptr || !x->type.shape || !count) return {};
  return ordered(builder, call, *count, boolean(call.arg("largest")));
}

// The largest or smallest along a dim, and where it is.
template <bool kLargest>
Values extreme(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.is_known() || x->type.shape->empty() ||
      !ir::is_number(x->type.dtype)) {
    return {};
  }
  const int64_t at = axis(call, "dim", x->type.shape->size());
  const bool keeps = boolean(call.arg("keepdim"));
  Values values =
      reduce(builder, kLargest ? "ReduceMax" : "ReduceMin", x, {at}, keeps, {call.types[0]});
  if (values.empty()) return {};
  values.push_back(builder.node1(kLargest ? "ArgMax" : "ArgMin", {x}, call.types[1],
                                 {{"axis", Dim(at)}, {"keepdims", Dim(keeps ? 1 : 0)}}));
  return values;
}

// The place of the largest or smallest of all numbers.
template <bool kLargest>
Values extreme_of_all(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !call.arg("dim").is_none() || !ir::is_number(x->type.dtype)) return {};
  if (!call.types[0].shape) return {};
  Formula f(builder);
  Type one = call.types[0];
  one.shape = Shape{1};
  Value* place = builder.node1(kLargest ? "ArgMax" : "ArgMin", {f.reshape(x, {-1})}, one,
                               {{"axis", Dim(0)}, {"keepdims", Dim(1)}});
  return {f.reshape(place, *call.types[0].shape)};
}

Values nonzero(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.shape || x->type.shape->empty() || !call.types[0].is_known())
    return {};
  const Shape& found = *call.types[0].shape;
  Type by_dim = call.types[0];
  by_dim.shape = Shape{found[1], found[0]};
  return {builder.transpose(builder.node1("NonZero", {x}, by_dim), {1, 0})};
}

// ---- parts that are replaced

Dim sum(const Dim& a, const Dim& b) { return Dim::make(ir::DimOp::kAdd, a, b); }

// The numbers from `start` up to `end` along a dim.
Value* part(Builder& builder, Value* x, int64_t at, const Dim& start, const Dim& end) {
  Type type = x->type;
  (*type.shape)[at] = Dim::make(ir::DimOp::kSub, end, start);
  type.strides.reset();
  return builder.node1("Slice", {x, builder.ints({start}), builder.ints({end}), builder.ints({at})},
                       type);
}

// x, with `made` in the place of the numbers from `start` up to `end`.
Values with_part(Builder& builder, Value* x, Value* made, int64_t at, const Dim& start,
                 const Dim& end) {
  const Dim& size = (*x->type.shape)[at];
  Values parts = {part(builder, x, at, 0, start), made, part(builder, x, at, end, size)};
  Type type = x->type;
  type.strides.reset();
  return {builder.node1("Concat", parts, type, {{"axis", Dim(at)}})};
}

// A place that may count from the end, from the front.
std::optional<Dim> from_front(const ops::Arg& arg, const Dim& size) {
  const std::optional<Dim> place = dim(arg);
  if (!place || !place->is_constant()) return place;
  return place->constant() < 0 ? sum(size, *place) : *place;
}

Values select_scatter(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *made = tensor(call.arg("src"));
  if (x == nullptr || made == nullptr || !x->type.shape || !builder.allows(10)) return {};
  const int64_t at = axis(call, "dim", x->type.shape->size());
  const std::optional<Dim> place = from_front(call.arg("index"), (*x->type.shape)[at]);
  if (!place) return {};
  Formula f(builder);
  Shape shape = *x->type.shape;
  shape[at] = 1;
  made = f.reshape(f.cast(made, x->type.dtype), shape);
  return with_part(builder, x, made, at, *place, sum(*place, 1));
}

Values slice_scatter(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("self")), *made = tensor(call.arg("src"));
  if (x == nullptr || made == nullptr || !x->type.shape || !made->type.shape ||
      !builder.allows(10) || dim(call.arg("step")) != Dim(1)) {
    return {};
  }
  const int64_t at = axis(call, "dim", x->type.shape->size());
  const ops::Arg& start = call.arg("start");
  const std::optional<Dim> first =
      start.is_none() ? Dim(0) : from_front(start, (*x->type.shape)[at]);
  if (!first) return {};
  Formula f(builder);
  const Dim end = sum(*first, (*made->type.shape)[at]);
  return with_part(builder, x, f.cast(made, x->type.dtype), at, *first, end);
}

// A number, or a tensor, in the shape of the result.
Values filled(Builder& builder, const AtenCall& call, const char* name) {
  const Type& type = call.types[0];
  if (!type.is_known() || !builder.allows(8)) return {};
  Formula f(builder);
  Value* value = tensor(call.arg(name));
  if (value == nullptr) {
    if (!is_number(call.arg(name))) return {};
    value = builder.scalar(number(call.arg(name)), type.dtype);
    if (value == nullptr) return {};
  }
  return {builder.node1("Expand", {f.cast(value, type.dtype), builder.ints(*type.shape)}, type)};
}

Values fill(Builder& builder, const AtenCall& call) { return filled(builder, call, "value"); }
Values copy(Builder& builder, const AtenCall& call) { return filled(builder, call, "src"); }

// ---- images

constexpr char kNearest[] = "nearest", kLinear[] = "linear", kCubic[] = "cubic";
constexpr char kReflect[] = "reflect", kEdge[] = "edge";

// Pads of numbers of the image itself.
template <const char* kMode>
Values pad(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  const Shape padding = dims(call.arg("padding"));
  if (x == nullptr || !x->type.shape || !ir::is_constant(padding) || !builder.allows(11)) return {};
  const size_t rank = x->type.shape->size();
  Shape pads(2 * rank, Dim(0));
  for (size_t i = 0; i < padding.size(); ++i) {
    if (padding[i].constant() < 0) return {};
    pads[(i % 2) * rank + rank - 1 - i / 2] = padding[i];
  }
  return {
      builder.node1("Pad", {x, builder.ints(pads)}, call.types[0], {{"mode", std::string(kMode)}})};
}

// A one-dimensional tensor of floats.
Value* floats(Builder& builder, Formula& f, const std::vector<double>& numbers) {
  Values each;
  for (const double number : numbers) {
    each.push_back(f.reshape(builder.scalar(number, DType::kFloat), {1}));
  }
  Type type = each[0]->type;
  type.shape = Shape{static_cast<int64_t>(numbers.size())};
  return builder.node1("Concat", each, type, {{"axis", Dim(0)}});
}

// The factors that the caller gave, which decide where pixels lie; nothing if there are none.
std::vector<double> given_factors(const AtenCall& call) {
  std::vector<double> factors;
  for (size_t i = 0; i < call.arg_names.size(); ++i) {
    if (!call.arg_names[i].starts_with("scales") || !is_number(call.args[i])) continue;
    factors.push_back(number(call.args[i]));
  }
  return factors;
}

template <size_t kRank, const char* kMode>
Values resize(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.is_known() || x->type.shape->size() != kRank + 2 ||
      !is_float(x->type.dtype) || !call.types[0].is_known() || !builder.allows(13)) {
    return {};
  }
  const std::string mode = kMode;
  const bool has_corners = std::find(call.arg_names.begin(), call.arg_names.end(),
                                     "align_corners") != call.arg_names.end();
  const bool aligns = has_corners && boolean(call.arg("align_corners"));
  ir::Attrs attrs = {{"mode", mode}};
  attrs["coordinate_transformation_mode"] = std::string(mode == kNearest ? "asymmetric"
                                                        : aligns         ? "align_corners"
                                                                         : "half_pixel");
  if (mode == kNearest) attrs["nearest_mode"] = std::string("floor");
  if (mode == kCubic) attrs["cubic_coeff_a"] = -0.75;
  Formula f(builder);
  std::vector<double> factors = given_factors(call);
  if (factors.size() == kRank && !aligns) {
    factors.insert(factors.begin(), {1, 1});
    return {builder.node1("Resize", {x, nullptr, floats(builder, f, factors)}, call.types[0],
                          std::move(attrs))};
  }
  if (!factors.empty() && !aligns) return {};
  return {builder.node1("Resize", {x, nullptr, nullptr, builder.ints(*call.types[0].shape)},
                        call.types[0], std::move(attrs))};
}

Values grid_sample(Builder& builder, const AtenCall& call) {
  Value *x = tensor(call.arg("input")), *grid = tensor(call.arg("grid"));
  // Older opsets have other words for the modes, which newer ones lack.
  if (x == nullptr || grid == nullptr || !builder.allows(20)) return {};
  static const char* const kModes[] = {"linear", "nearest", "cubic"};
  static const char* const kPads[] = {"zeros", "border", "reflection"};
  return {builder.node1("GridSample", {x, grid}, call.types[0],
                        {{"mode", std::string(kModes[integer(call.arg("interpolation_mode"))])},
                         {"padding_mode", std::string(kPads[integer(call.arg("padding_mode"))])},
                         {"align_corners", Dim(boolean(call.arg("align_corners")) ? 1 : 0)}})};
}

// ---- tensors of numbers

Values linspace(Builder& builder, const AtenCall& call) {
  const ops::Arg &start = call.arg("start"), &end = call.arg("end");
  const std::optional<Dim> steps = dim(call.arg("steps"));
  if (!is_number(start) || !is_number(end) || !steps || !steps->is_constant()) return {};
  const DType dtype = call.types[0].dtype;
  if (!is_float(dtype)) return {};
  Formula f(builder, dtype);
  const double last = static_cast<double>(std::max<int64_t>(steps->constant() - 1, 1));
  Value* places = f.number(range(f, *steps));
  Value* numbers =
      f.add(f.scaled(places, (number(end) - number(start)) / last), f.constant(number(start)));
  return {f.cast(numbers, dtype)};
}

Values eye(Builder& builder, const AtenCall& call) {
  const Type& type = call.types[0];
  if (!type.is_known()) return {};
  Value* ones = builder.make("ConstantOfShape", {builder.ints(*type.shape)});
  return {
      builder.node1("EyeLike", {ones}, type, {{"dtype", Dim(static_cast<int64_t>(type.dtype))}})};
}

const Table& formulas() {
  static const Table filled = [] {
    Table table;
    table.add("aten::_log_softmax", softmax<ops::log_softmax>);
    table.add("aten::_scaled_dot_product_flash_attention_for_cpu", attention);
    table.add("aten::_softmax", softmax<ops::softmax>);
    table.add("aten::all", count_true<true>);
    table.add("aten::all.dim", count_true<true>);
    table.add("aten::any", count_true<false>);
    table.add("aten::any.dim", count_true<false>);
    table.add("aten::arange", arange);
    table.add("aten::arange.start", arange);
    table.add("aten::arange.start_step", arange);
    table.add("aten::argmax", extreme_of_all<true>);
    table.add("aten::argmin", extreme_of_all<false>);
    table.add("aten::clamp_max.Tensor", bounded<false>);
    table.add("aten::clamp_min.Tensor", bounded<true>);
    table.add("aten::clone", clone);
    table.add("aten::copy", copy);
    table.add("aten::cumsum", cumsum);
    table.add("aten::div.Tensor_mode", floor_quotient);
    table.add("aten::eye", eye);
    table.add("aten::eye.m", eye);
    table.add("aten::fill.Scalar", fill);
    table.add("aten::fill.Tensor", fill);
    table.add("aten::gelu", gelu);
    table.add("aten::grid_sampler_2d", grid_sample);
    table.add("aten::grid_sampler_3d", grid_sample);
    table.add("aten::hardswish", activation<ops::hard_swish>);
    table.add("aten::index.Tensor", index);
    table.add("aten::linspace", linspace);
    table.add("aten::max.dim", extreme<true>);
    table.add("aten::min.dim", extreme<false>);
    table.add("aten::mish", activation<ops::mish>);
    table.add("aten::native_layer_norm", layer_norm);
    table.add("aten::nonzero", nonzero);
    for (const char* dims : {"1d", "2d", "3d"}) {
      table.add(concat("aten::reflection_pad", dims), pad<kReflect>);
      table.add(concat("aten::replication_pad", dims), pad<kEdge>);
    }
    table.add("aten::rsqrt", activation<rsqrt>);
    table.add("aten::scalar_tensor", scalar_tensor);
    table.add("aten::select_scatter", select_scatter);
    table.add("aten::silu", activation<ops::silu>);
    table.add("aten::slice_scatter", slice_scatter);
    table.add("aten::sort", sort);
    table.add("aten::sort.stable", sort);
    table.add("aten::topk", top);
    table.add("aten::upsample_bicubic2d", resize<2, kCubic>);
    table.add("aten::upsample_bilinear2d", resize<2, kLinear>);
    table.add("aten::upsample_linear1d", resize<1, kLinear>);
    table.add("aten::upsample_nearest1d", resize<1, kNearest>);
    table.add("aten::upsample_nearest2d", resize<2, kNearest>);
    table.add("aten::upsample_nearest3d", resize<3, kNearest>);
    table.add("aten::upsample_trilinear3d", resize<3, kLinear>);
    return table;
  }();
  return filled;
}

// The call that a node stands for.
AtenCall call_of(const ir::Node& node, const c10::FunctionSchema& schema) {
  AtenCall call;
  call.op = schema.name();
  call.overload = schema.overload_name();
  call.args = ops::decode_aten(node).args;
  for (const c10::Argument& argument : schema.arguments()) {
    call.arg_names.push_back(argument.name());
  }
  for (const Value* output : node.outputs) {
    call.types.push_back(output != nullptr ? output->type : Type());
    call.used.push_back(output != nullptr && !output->uses.empty());
  }
  call.name = node.name;
  call.origin = node.origin;
  return call;
}

bool spell_out(ir::Graph& graph, ir::Node& node, Builder& builder) {
  const auto op =
      c10::Dispatcher::singleton().findSchema({ir::string_attr(node.attrs, "operator", ""),
                                               ir::string_attr(node.attrs, "overload_name", "")});
  if (!op) return false;
  const c10::FunctionSchema& schema = op->schema();
  const AtenCall call = call_of(node, schema);
  const Builder::Scope scope(builder, call, &node);
  const Row* formula = formulas().find(call.key());
  const Values values =
      formula != nullptr ? apply(*formula, builder, call) : by_row(builder, call, schema);
  if (values.empty()) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] == nullptr || node.outputs[i] == nullptr) continue;
    values[i]->type = node.outputs[i]->type;
    ir::replace_uses(*node.outputs[i], *values[i], graph);
  }
  ir::erase(graph, node);
  return true;
}

}  // namespace

int spell_out(ir::Graph& graph, int max_opset) {
  Builder builder(graph, max_opset);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (ir::is(&node, "ATen", ir::kAtenDomain) && spell_out(graph, node, builder)) ++rewrites;
    for (const auto& body : ir::bodies(node)) rewrites += spell_out(*body, max_opset);
  }
  for (Value& value : graph.values) value.type.strides.reset();
  return rewrites;
}

}  // namespace torch_ort::convert
