// ATen nodes in the words of older opsets, or with sizes among their numbers.
#include "convert/portable.h"
#include "convert/rows.h"
#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/shapes.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <set>

namespace torch_ort::convert {

namespace {

using ir::Dim;
using ir::DType;
using ir::Shape;
using ir::Type;
using ir::Value;
using Values = std::vector<Value*>;

// What formulas are made of; types follow from the operands.
class Formula {
 public:
  explicit Formula(Builder& builder, DType dtype = DType::kFloat)
      : builder_(builder), dtype_(dtype == DType::kDouble ? dtype : DType::kFloat) {}

  Value* make(std::string_view op, Values inputs, ir::Attrs attrs = {}) {
    return builder_.make(op, std::move(inputs), std::move(attrs));
  }
  Value* reduce(std::string_view op, Value* x, const Shape& axes) {
    return convert::reduce(builder_, op, x, axes, true, {Type()})[0];
  }
  Value* constant(double number) { return builder_.scalar(number, dtype_); }
  Value* add(Value* a, Value* b) { return make("Add", {a, b}); }
  Value* sub(Value* a, Value* b) { return make("Sub", {a, b}); }
  Value* mul(Value* a, Value* b) { return make("Mul", {a, b}); }
  Value* scaled(Value* x, double factor) { return mul(x, constant(factor)); }
  // A value in the dtype that is computed in: half types are too short for sums.
  Value* wide(Value* x) { return cast(x, dtype_); }
  Value* cast(Value* x, DType dtype) { return builder_.cast(x, dtype); }
  // A size as a tensor without dims.
  Value* size(const Dim& dim) {
    if (!dim.is_constant()) return reshape(builder_.ints({dim}), {});
    return builder_.scalar(static_cast<double>(dim.constant()), DType::kInt64);
  }
  Value* reshape(Value* x, const Shape& shape) { return builder_.reshape(x, shape); }

 private:
  Builder& builder_;
  DType dtype_;
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

Values pointwise(Builder& builder, const AtenCall& call, Value* (*formula)(Formula&, Value*)) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !is_float(x->type.dtype)) return {};
  Formula f(builder, x->type.dtype);
  return {f.cast(formula(f, f.wide(x)), x->type.dtype)};
}

template <Value* (*kFormula)(Formula&, Value*)>
Values activation(Builder& builder, const AtenCall& call) {
  return pointwise(builder, call, kFormula);
}

Value* rsqrt(Formula& f, Value* x) { return f.make("Reciprocal", {f.make("Sqrt", {x})}); }

Value* silu(Formula& f, Value* x) { return f.mul(x, f.make("Sigmoid", {x})); }

Value* hard_swish(Formula& f, Value* x) {
  return f.mul(x, f.make("HardSigmoid", {x}, {{"alpha", 1.0 / 6.0}, {"beta", 0.5}}));
}

Value* mish(Formula& f, Value* x) { return f.mul(x, f.make("Tanh", {f.make("Softplus", {x})})); }

Value* gelu_exact(Formula& f, Value* x) {
  Value* error = f.make("Erf", {f.scaled(x, 1 / std::numbers::sqrt2)});
  return f.mul(f.scaled(x, 0.5), f.add(error, f.constant(1)));
}

Value* gelu_tanh(Formula& f, Value* x) {
  Value* cube = f.mul(f.mul(x, x), x);
  const double factor = std::sqrt(2 / std::numbers::pi);
  Value* inner = f.scaled(f.add(x, f.scaled(cube, 0.044715)), factor);
  return f.mul(f.scaled(x, 0.5), f.add(f.make("Tanh", {inner}), f.constant(1)));
}

Values gelu(Builder& builder, const AtenCall& call) {
  const bool is_tanh = text(call.arg("approximate"), "none") == "tanh";
  return pointwise(builder, call, is_tanh ? gelu_tanh : gelu_exact);
}

// ---- softmax

Value* softmax_of(Formula& f, Value* x, const Shape& axes, bool is_log) {
  Value* shifted = f.sub(x, f.reduce("ReduceMax", x, axes));
  Value* powers = f.make("Exp", {shifted});
  Value* sum = f.reduce("ReduceSum", powers, axes);
  return is_log ? f.sub(shifted, f.make("Log", {sum})) : f.make("Div", {powers, sum});
}

template <bool kLog>
Values softmax(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (!is_known_float(x) || x->type.shape->empty()) return {};
  Formula f(builder, x->type.dtype);
  const Shape axes = {axis(call, "dim", x->type.shape->size())};
  return {f.cast(softmax_of(f, f.wide(x), axes, kLog), call.types[0].dtype)};
}

// ---- norms

Values layer_norm(Builder& builder, const AtenCall& call) {
  Value* input = tensor(call.arg("input"));
  const size_t count = dims(call.arg("normalized_shape")).size();
  if (!is_known_float(input) || count > input->type.shape->size() || call.used[1] || call.used[2]) {
    return {};
  }
  Formula f(builder, input->type.dtype);
  Value* x = f.wide(input);
  const Shape axes = last_axes(x, count);
  x = f.sub(x, f.reduce("ReduceMean", x, axes));
  Value* variance = f.reduce("ReduceMean", f.mul(x, x), axes);
  Value* epsilon = f.constant(number(call.arg("eps")));
  x = f.make("Div", {x, f.make("Sqrt", {f.add(variance, epsilon)})});
  if (Value* weight = tensor(call.arg("weight"))) x = f.mul(x, f.wide(weight));
  if (Value* bias = tensor(call.arg("bias"))) x = f.add(x, f.wide(bias));
  return {f.cast(x, input->type.dtype), nullptr, nullptr};
}

// ---- attention

Value* range(Formula& f, const Dim& size) {
  Value* numbers = f.make("Range", {f.size(0), f.size(size), f.size(1)});
  numbers->type.shape = Shape{size};
  return numbers;
}

// Minus infinity where a key comes after its query.
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
  Value* q = f.scaled(f.wide(tensor(call.arg("query"))), factor);
  Value* k = builder.transpose(f.wide(tensor(call.arg("key"))), {0, 1, 3, 2});
  Value* scores = f.make("MatMul", {q, k});
  if (Value* mask = tensor(call.arg("attn_mask"))) scores = f.add(scores, f.wide(mask));
  if (boolean(call.arg("is_causal"))) scores = causal(f, scores, of_query[2], of_key[2]);
  Value* weights = softmax_of(f, scores, {3}, false);
  Value* result = f.make("MatMul", {weights, f.wide(tensor(call.arg("value")))});
  return {f.cast(result, query->type.dtype), nullptr};
}

// Layouts do not cross files.
Values clone(Builder& builder, const AtenCall& call) {
  return {Formula(builder).make("Identity", {tensor(call.arg("self"))})};
}

// Places along the first dims, as places in a tensor that has one dim in their stead.
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
    // Negative places count from the end: Mod has the sign of the divisor.
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

// A row of the common table, with tensors in the place of sizes, and in arithmetic with operands of
// the dtype that PyTorch promotes them to.
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

// Whether some elements are not 0, or all: none makes the first false and the second true.
template <bool kAll>
Values count_true(Builder& builder, const AtenCall& call) {
  Value* x = tensor(call.arg("self"));
  if (x == nullptr || !x->type.is_known() || !call.types[0].shape) return {};
  Shape axes = last_axes(x, x->type.shape->size());
  if (call.overload == "dim") axes = {axis(call, "dim", x->type.shape->size())};
  Formula f(builder);
  Value* counted = f.cast(x, DType::kBool);
  if (kAll) counted = f.make("Not", {counted});
  counted = f.reduce("ReduceSum", f.cast(counted, DType::kInt64), axes);
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
  // Div rounds towards zero; without the remainder there is nothing to round.
  return {f.make("Div", {f.sub(a, f.make("Mod", {a, b})), b})};
}

const Table& formulas() {
  static const Table filled = [] {
    Table table;
    table.add("aten::_log_softmax", softmax<true>);
    table.add("aten::_scaled_dot_product_flash_attention_for_cpu", attention);
    table.add("aten::_softmax", softmax<false>);
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
    table.add("aten::hardswish", activation<hard_swish>);
    table.add("aten::index.Tensor", index);
    table.add("aten::mish", activation<mish>);
    table.add("aten::native_layer_norm", layer_norm);
    table.add("aten::rsqrt", activation<rsqrt>);
    table.add("aten::scalar_tensor", scalar_tensor);
    table.add("aten::silu", activation<silu>);
    return table;
  }();
  return filled;
}

// The call that a node was made from.
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
