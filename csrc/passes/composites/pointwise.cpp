// What is computed element by element: dropout, powers, bounds, and products with sizes; and norms
// of vectors.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/dropout.h"
#include "passes/known_sizes.h"

#include <cmath>

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Type;
using ir::Value;

// ---- dropout

Value* scale_kept(Expander& write, Value* x, Value* mask, double scale) {
  Value* kept = write.make("Mul", {write.number(x), write.number(mask)});
  return write.make("Mul", {kept, write.constant(scale)});
}

bool expand_dropout(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  const std::optional<double> ratio = dropout_ratio(node);
  if (!ratio || !is_fusible_float(x)) return false;
  // draw_as_eager has left the mask alone.
  if (node.outputs.empty() || node.outputs[0] == nullptr) return false;
  Expander write(graph, node, *x);
  // The kernel draws in the order of memory, so the mask must have the strides of the result.
  Type type = node.outputs[0]->type;
  type.dtype = DType::kBool;
  Value* mask = write.make_ours("BernoulliMask", {}, type, {{"keep", 1 - *ratio}});
  write.replace(0, scale_kept(write, x, mask, 1 / (1 - *ratio)));
  write.replace(1, mask);
  return true;
}

bool expand_dropout_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *mask = tensor(call.args.at(1));
  const auto* scale = std::get_if<double>(&call.args.at(2).value);
  if (!is_fusible_float(grad) || mask == nullptr || !mask->type.is_known() || scale == nullptr)
    return false;
  Expander write(graph, node, *grad);
  write.replace(0, scale_kept(write, grad, mask, *scale));
  return true;
}

// ---- sizes as numbers

// A product with a size or a quotient by one, as in the gradient of a mean.
bool expand_by_size(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const auto* size = std::get_if<Dim>(&call.args.at(1).value);
  const bool is_plain = call.overload == "Tensor" || call.overload == "Scalar";
  if (!is_plain || !is_fusible_float(x) || size == nullptr || !KnownSizes(graph).is_known(*size)) {
    return false;
  }
  Expander write(graph, node, *x);
  const char* op = call.op == ops::aten::kDiv ? "Div" : "Mul";
  write.replace_elements(0, write.make(op, {write.number(x), write.ratio(1, *size, 1)}));
  return true;
}

// ---- powers and bounds

bool expand_pow(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  const std::optional<double> exponent = ops::known_double(node.inputs[1]);
  if (!is_fusible_float(x) || !exponent) return false;
  Expander write(graph, node, *x);
  const auto square = [&] { return write.make("Mul", {write.number(x), write.number(x)}); };
  // As in the gradient of a square.
  if (*exponent == 1) {
    write.replace_elements(0, write.make("Mul", {write.number(x), write.constant(1)}));
  } else if (*exponent == 2) {
    write.replace_elements(0, square());
  } else if (*exponent == 3) {
    write.replace_elements(0, write.make("Mul", {square(), write.number(x)}));
  } else if (*exponent == 0.5) {
    write.replace_elements(0, write.make("Sqrt", {write.number(x)}));
  } else if (*exponent == -0.5) {
    write.replace_elements(0, write.formula().rsqrt(write.number(x)));
  } else if (*exponent == -2) {
    write.replace_elements(0, write.make("Reciprocal", {square()}));
  } else if (*exponent == -1) {
    write.replace_elements(0, write.make("Reciprocal", {write.number(x)}));
  } else {
    return false;
  }
  return true;
}

bool expand_rsqrt(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x)) return false;
  Expander write(graph, node, *x);
  write.replace_elements(0, write.formula().rsqrt(write.number(x)));
  return true;
}

bool expand_clip(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x)) return false;
  std::optional<double> bounds[2];
  for (size_t i = 0; i < 2; ++i) {
    if (!ops::has_input(node, i + 1)) continue;
    bounds[i] = ops::known_double(node.inputs[i + 1]);
    if (!bounds[i]) return false;
  }
  if (!bounds[0] && !bounds[1]) return false;
  Expander write(graph, node, *x);
  x = write.number(x);
  if (bounds[0]) x = write.make("Max", {x, write.constant(*bounds[0])});
  if (bounds[1]) x = write.make("Min", {x, write.constant(*bounds[1])});
  write.replace_elements(0, x);
  return true;
}

// ---- the larger or smaller of two tensors, and products that are added

// Whether operators of these compute in one dtype, in the shape of the result.
bool are_alike(const Value* x, const Value* y) {
  return is_fusible_float(x) && is_fusible_float(y) && x->type.dtype == y->type.dtype;
}

bool expand_bound(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *x = tensor(call.args.at(0)), *bound = tensor(call.args.at(1));
  if (call.overload != "Tensor" || !are_alike(x, bound)) return false;
  Expander write(graph, node, *x);
  const char* op = call.op == ops::aten::kClampMin ? "Max" : "Min";
  write.replace_elements(0, write.make(op, {write.number(x), write.number(bound)}));
  return true;
}

// a + weight (b - a), from the end that is nearer
bool expand_lerp(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *a = tensor(call.args.at(0)), *b = tensor(call.args.at(1));
  const std::optional<double> weight = ops::as_double(call.args.at(2));
  if (!weight || !are_alike(a, b)) return false;
  Expander write(graph, node, *a);
  ops::Formula& f = write.formula();
  a = f.number(a), b = f.number(b);
  Value* whole = f.sub(b, a);
  write.replace_elements(0, std::abs(*weight) < 0.5 ? f.add(a, f.scaled(whole, *weight))
                                                    : f.sub(b, f.scaled(whole, 1 - *weight)));
  return true;
}

// a + value * b * c
bool expand_addcmul(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *a = tensor(call.args.at(0)), *b = tensor(call.args.at(1)), *c = tensor(call.args.at(2));
  const std::optional<double> value = ops::as_double(call.args.at(3));
  if (!value || !are_alike(a, b) || !are_alike(a, c)) return false;
  Expander write(graph, node, *a);
  ops::Formula& f = write.formula();
  Value* product = f.mul(f.scaled(f.number(b), *value), f.number(c));
  write.replace_elements(0, f.add(f.number(a), product));
  return true;
}

// x log(y), which is 0 where x is 0, unless y is NaN
bool expand_xlogy(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *x = tensor(call.args.at(0)), *y = tensor(call.args.at(1));
  if (call.overload != "Tensor" || !are_alike(x, y)) return false;
  Expander write(graph, node, *x);
  x = write.number(x), y = write.number(y);
  Value* product = write.make("Mul", {x, write.make("Log", {y})});
  Value* is_zero = write.make("Equal", {x, write.constant(0)});
  Value* bent = write.make("Where", {is_zero, write.constant(0), product});
  write.replace_elements(0, write.make("Where", {write.make("IsNaN", {y}), y, bent}));
  return true;
}

// ---- norms of vectors, along some dims

// |x| added up, or the root of the squares added up. `inputs` are those of a sum, x first.
Value* norm(Expander& write, std::vector<Value*> inputs, const ir::Attrs& attrs, bool is_sum) {
  Value* x = write.number(inputs[0]);
  inputs[0] = is_sum ? write.make("Abs", {x}) : write.formula().square(x);
  Value* sum = write.make("ReduceSum", std::move(inputs), attrs);
  return is_sum ? sum : write.make("Sqrt", {sum});
}

bool expand_reduced_norm(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || ops::rank_of(*x) == 0 || !ops::reduction_axes(node)) return false;
  Expander write(graph, node, *x);
  write.replace(0, norm(write, node.inputs, node.attrs, ir::is(&node, "ReduceL1")));
  return true;
}

bool expand_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  if (call.overload != "ScalarOpt_dim" || !is_fusible_float(x) || ops::rank_of(*x) == 0) {
    return false;
  }
  const ops::Arg& given = call.args.at(1);
  const std::optional<double> order = given.is_none() ? 2 : ops::as_double(given);
  const auto* axes = std::get_if<ops::ArgList>(&call.args.at(2).value);
  const auto* keeps = std::get_if<bool>(&call.args.at(3).value);
  if (order != 1 && order != 2) return false;
  if (axes == nullptr || axes->empty() || keeps == nullptr) return false;
  ir::Shape dims;
  for (const ops::Arg& axis : *axes) dims.push_back(integer(axis));
  Expander write(graph, node, *x);
  const ir::Attrs attrs = {{"keepdims", Dim(*keeps ? 1 : 0)}};
  write.replace(0, norm(write, {x, write.ints(dims)}, attrs, order == 1));
  return true;
}

constexpr Expansion kRows[] = {
    {"Clip", expand_clip},
    {"Dropout", expand_dropout},
    {"Pow", expand_pow},
    {"ReduceL1", expand_reduced_norm},
    {"ReduceL2", expand_reduced_norm},
    {ops::aten::kAddcmul, expand_addcmul},
    {ops::aten::kClampMax, expand_bound},
    {ops::aten::kClampMin, expand_bound},
    {ops::aten::kDiv, expand_by_size},
    {ops::aten::kDropoutBackward, expand_dropout_backward},
    {ops::aten::kLerp, expand_lerp},
    {ops::aten::kMul, expand_by_size},
    {ops::aten::kNorm, expand_norm},
    {ops::aten::kRsqrt, expand_rsqrt},
    {ops::aten::kXlogy, expand_xlogy},
};

}  // namespace

std::span<const Expansion> pointwise() { return kRows; }

}  // namespace torch_ort::passes::composites
