// What is computed element by element: dropout, powers, bounds, and products with sizes.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/fusion.h"
#include "ops/shapes.h"
#include "passes/arguments.h"
#include "passes/composites/expander.h"
#include "passes/dropout.h"
#include "passes/known_sizes.h"

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

constexpr Expansion kRows[] = {
    {"Clip", expand_clip},
    {"Dropout", expand_dropout},
    {"Pow", expand_pow},
    {ops::aten::kDiv, expand_by_size},
    {ops::aten::kDropoutBackward, expand_dropout_backward},
    {ops::aten::kMul, expand_by_size},
    {ops::aten::kRsqrt, expand_rsqrt},
};

}  // namespace

std::span<const Expansion> pointwise() { return kRows; }

}  // namespace torch_ort::passes::composites
