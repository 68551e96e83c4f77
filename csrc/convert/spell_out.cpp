// ATen nodes in the words of older opsets, or with sizes among their numbers.
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
    table.add("aten::clone", clone);
    table.add("aten::cumsum", cumsum);
    table.add("aten::div.Tensor_mode", floor_quotient);
    table.add("aten::gelu", gelu);
    table.add("aten::hardswish", activation<ops::hard_swish>);
    table.add("aten::index.Tensor", index);
    table.add("aten::mish", activation<ops::mish>);
    table.add("aten::native_layer_norm", layer_norm);
    table.add("aten::rsqrt", activation<rsqrt>);
    table.add("aten::scalar_tensor", scalar_tensor);
    table.add("aten::silu", activation<ops::silu>);
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
