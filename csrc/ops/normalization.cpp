// Ops that shift and scale by statistics: of rows, groups of channels, or whole batches.
#include "ops/normalization.h"

#include "base/error.h"
#include "ops/aten_names.h"
#include "ops/cast.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using ir::Dim;
using ir::DType;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;
using enum AttrKind;

constexpr auto kKernel = ImageForm::Kind::kKernel;

double epsilon(const Node& node) { return ir::float_attr(node.attrs, "epsilon", 1e-5); }

// Kernels compute statistics in float32 or wider, which is what 1 requires.
void check_precision(const Node& node) {
  const int64_t type = ir::int_attr(node.attrs, "stash_type", 1);
  if (type != 1) throw Unsupported(concat(node.op.str(), ": stash_type: got ", type, ", want 1"));
}

// ---- LayerNormalization, RMSNormalization: over the dims from `axis` on

int64_t first_axis(const Node& node) {
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  return wrap_axis(node, ir::int_attr(node.attrs, "axis", -1), rank);
}

Shape normalized_shape(const Node& node) {
  const Shape& shape = known_shape(node, input(node, 0));
  return {shape.begin() + first_axis(node), shape.end()};
}

std::vector<Type> infer_layer_norm(const Node& node) {
  const Type& x = input(node, 0).type;
  std::optional<Shape> reduced;
  if (x.shape) {
    reduced = *x.shape;
    for (size_t i = first_axis(node); i < reduced->size(); ++i) (*reduced)[i] = 1;
  }
  Type statistic = with_shape(x, reduced);
  statistic.dtype = DType::kFloat;
  std::vector<Type> types = {with_shape(x, x.shape), statistic, statistic};
  types.resize(node.outputs.size());
  return types;
}

// A scale or bias, expanded to the shape that the kernel requires.
Value* stretched(CallList& calls, const Node& node, Value* value, const Shape& shape) {
  if (value == nullptr || known_shape(node, *value) == shape) return value;
  Value* result = calls.temporary(expanded_type(value->type, shape));
  calls.add("aten::expand", "", {value, Arg::list(shape), false}, {result});
  return result;
}

Value* output(const Node& node, size_t slot) {
  return slot < node.outputs.size() ? node.outputs[slot] : nullptr;
}

void lower_layer_norm(const Node& node, CallList& calls) {
  check_precision(node);
  const Shape shape = normalized_shape(node);
  Value* scale = stretched(calls, node, &input(node, 1), shape);
  Value* bias = stretched(calls, node, has_input(node, 2) ? node.inputs[2] : nullptr, shape);
  calls.add("aten::native_layer_norm", "",
            {node.inputs[0], Arg::list(shape), scale, bias, epsilon(node)},
            {output(node, 0), output(node, 1), output(node, 2)});
}

// The steps that PyTorch computes on the CPU, where it has no kernel for RMS norm.
void lower_rms_norm_steps(const Node& node, CallList& calls) {
  const DType dtype = input(node, 0).type.dtype;
  const DType wide = computed_dtype(dtype);
  Value* x = cast(calls, node.inputs[0], wide);
  Shape reduced = known_shape(node, *x);
  ArgList axes;
  for (auto axis = first_axis(node); axis < static_cast<int64_t>(reduced.size()); ++axis) {
    reduced[axis] = 1;
    axes.push_back(axis);
  }
  const auto full = [&] { return calls.temporary(with_shape(x->type, x->type.shape)); };
  const auto row = [&] { return calls.temporary(with_shape(x->type, reduced)); };
  Value *square = full(), *mean = row(), *moved = row(), *factor = row(), *scaled = full();
  calls.add("aten::pow", "Tensor_Scalar", {x, 2}, {square});
  calls.add("aten::mean", "dim", {square, axes, true, Arg()}, {mean});
  calls.add("aten::add", "Scalar", {mean, epsilon(node), 1}, {moved});
  calls.add("aten::rsqrt", "", {moved}, {factor});
  calls.add("aten::mul", "Tensor", {x, factor}, {scaled});
  Value* scale = cast(calls, &input(node, 1), wide);
  if (wide == dtype) {
    calls.add("aten::mul", "Tensor", {scaled, scale}, {node.outputs[0]});
    return;
  }
  Value* result = full();
  calls.add("aten::mul", "Tensor", {scaled, scale}, {result});
  calls.add("aten::_to_copy", "", {result, ir::name(dtype), Arg(), Arg(), Arg(), false, Arg()},
            {node.outputs[0]});
}

void lower_rms_norm(const Node& node, CallList& calls) {
  check_precision(node);
  if (input(node, 0).type.device.kind == "cpu") {
    lower_rms_norm_steps(node, calls);
    return;
  }
  const Shape shape = normalized_shape(node);
  Value* scale = stretched(calls, node, &input(node, 1), shape);
  calls.add(aten::kRmsNorm, "", {node.inputs[0], Arg::list(shape), scale, epsilon(node)},
            {node.outputs[0], nullptr});
}

// ---- GroupNormalization

void lower_group_norm(const Node& node, CallList& calls) {
  check_precision(node);
  if (!ir::has_attr(node.attrs, "num_groups")) {
    throw UserError("GroupNormalization: attribute 'num_groups' is missing");
  }
  const Shape& shape = known_shape(node, input(node, 0));
  if (shape.size() < 2) {
    throw UserError(
        concat("GroupNormalization: input: got ", ir::to_string(shape), ", want rank 2 or more"));
  }
  const Dim area = ir::numel(Shape(shape.begin() + 2, shape.end()));
  calls.add(aten::kGroupNorm, "",
            {node.inputs[0], &input(node, 1), &input(node, 2), shape[0], shape[1], area,
             ir::int_attr(node.attrs, "num_groups", 1), epsilon(node)},
            {node.outputs[0], nullptr, nullptr});
}

// ---- BatchNormalization, with statistics that are given

std::vector<Type> infer_batch_norm(const Node& node) {
  std::vector<Type> types = infer_like_first(node);
  for (size_t slot = 3; slot < node.outputs.size() + 2; ++slot) {
    types.push_back(with_shape(input(node, slot).type, input(node, slot).type.shape));
  }
  return types;
}

void lower_batch_norm(const Node& node, CallList& calls) {
  if (ir::int_attr(node.attrs, "training_mode", 0) != 0 || output(node, 1) != nullptr) {
    throw Unsupported("BatchNormalization: training_mode: no kernel gives the statistics so");
  }
  // The momentum matters only in training.
  calls.add("aten::_native_batch_norm_legit_no_training", "",
            {node.inputs[0], &input(node, 1), &input(node, 2), &input(node, 3), &input(node, 4),
             0.1, epsilon(node)},
            {node.outputs[0], nullptr, nullptr});
}

int batch_norm_since(const Node& node) {
  if (input(node, 1).type.dtype != input(node, 0).type.dtype) return 15;
  if (input(node, 3).type.dtype != input(node, 0).type.dtype) return 14;
  return ir::has_attr(node.attrs, "training_mode") ? 14 : 9;
}

Op op(std::string name, int inputs, int since, InferRule infer, Lowering lower) {
  Op op;
  op.name = std::move(name);
  op.min_inputs = op.max_inputs = inputs;
  op.since = since;
  op.infer = infer;
  op.lower = lower;
  return op;
}

}  // namespace

LayerNorm layer_norm(Formula& f, Value* x, const Shape& axes, double epsilon, Value* weight,
                     Value* bias) {
  x = f.number(x);
  Value* mean = f.mean(x, axes);
  Value* centered = f.sub(x, mean);
  Value* variance = f.mean(f.square(centered), axes);
  Value* deviation = f.make("Sqrt", {f.add(variance, f.constant(epsilon))});
  Value* result = f.quotient(centered, deviation);
  if (weight != nullptr) result = f.mul(result, f.number(weight));
  if (bias != nullptr) result = f.add(result, f.number(bias));
  return {result, mean, deviation};
}

Value* normalized(Formula& f, Value* x, Value* mean, Value* rstd) {
  rstd = f.number(rstd);
  x = f.number(x);
  return f.mul(f.sub(x, f.number(mean)), rstd);
}

Value* layer_norm_gradient(Formula& f, Value* gradient, Value* weight, Value* normal, Value* rstd,
                           const Shape& axes) {
  Value* scaled = f.number(gradient);
  if (weight != nullptr) scaled = f.mul(scaled, f.number(weight));
  Value* mean = f.mean(scaled, axes);
  Value* mean_along = f.mean(f.mul(scaled, normal), axes);
  Value* rest = f.sub(scaled, mean);
  rest = f.sub(rest, f.mul(normal, mean_along));
  return f.mul(rest, f.number(rstd));
}

Value* layer_norm_weight_gradient(Formula& f, Value* gradient, Value* normal, const Shape& rows) {
  return f.total(f.mul(f.number(gradient), normal), rows);
}

RmsNorm rms_norm(Formula& f, Value* x, const Shape& axes, double epsilon, Value* weight) {
  x = f.number(x);
  Value* mean = f.mean(f.square(x), axes);
  Value* rstd = f.rsqrt(f.add(mean, f.constant(epsilon)));
  Value* result = f.mul(x, rstd);
  if (weight != nullptr) result = f.mul(result, f.number(weight));
  return {result, rstd};
}

Value* rms_norm_gradient(Formula& f, Value* gradient, Value* weight, Value* normal, Value* rstd,
                         const Shape& axes) {
  Value* scaled = f.number(gradient);
  if (weight != nullptr) scaled = f.mul(scaled, f.number(weight));
  Value* mean_along = f.mean(f.mul(scaled, normal), axes);
  return f.mul(f.sub(scaled, f.mul(normal, mean_along)), f.number(rstd));
}

void register_normalization(Registry& ops) {
  Op batch_norm = op("BatchNormalization", 5, 9, infer_batch_norm, lower_batch_norm);
  batch_norm.max_outputs = 3;
  batch_norm.attributes = {{"epsilon", kFloat}, {"momentum", kFloat}, {"training_mode", kInt}};
  batch_norm.bfloat16_since = 14;
  batch_norm.since_of = batch_norm_since;
  batch_norm.work.image = {.kind = kKernel, .takes_any_rank = true};
  ops.add(batch_norm);
  for (const char* name : {aten::kBatchNorm, aten::kBatchNormWithoutStatistics,
                           "aten::_native_batch_norm_legit_no_training"}) {
    ops.add(
        Operator{.name = name,
                 .work = {.image = {.kind = kKernel, .reads = {"input"}, .takes_any_rank = true}},
                 .check = check_batch_norm});
  }
  ops.add(Operator{.name = "aten::native_batch_norm", .check = check_batch_norm});
  ops.add(Operator{
      .name = aten::kBatchNormBackward,
      .work = {.image = {.kind = kKernel, .reads = {"grad_out", "input"}, .takes_any_rank = true}},
      .check = check_batch_norm_backward,
  });

  Op group_norm = op("GroupNormalization", 3, 21, infer_like_first, lower_group_norm);
  group_norm.attributes = {{"num_groups", kInt, true}, {"epsilon", kFloat}, {"stash_type", kInt}};
  group_norm.work.image = {.kind = kKernel, .takes_any_rank = true};
  ops.add(group_norm);

  const std::vector<AttrRule> of_rows = {{"axis", kInt}, {"epsilon", kFloat}, {"stash_type", kInt}};
  Op layer_norm = op("LayerNormalization", 3, 17, infer_layer_norm, lower_layer_norm);
  layer_norm.min_inputs = 2;
  layer_norm.max_outputs = 3;
  layer_norm.attributes = of_rows;
  ops.add(layer_norm);

  Op rms_norm = op("RMSNormalization", 2, 23, infer_like_first, lower_rms_norm);
  rms_norm.attributes = of_rows;
  ops.add(rms_norm);

  ops.add(Operator{
      .name = aten::kGroupNorm,
      .work = {.image = {.kind = kKernel, .reads = {"input"}, .takes_any_rank = true}},
      .is_placeable = true,
      .check = check_group_norm,
  });
  ops.add(Operator{
      .name = aten::kGroupNormBackward,
      // On channels-last images the kernel writes the gradient of the input even if nobody asks for
      // it.
      .work = {.image = {.kind = kKernel,
                         .reads = {"grad_out", "input"},
                         .takes_any_rank = true,
                         .wants_first_image = true}},
      .is_placeable = true,
      .check = check_group_norm,
  });
  ops.add(Operator{.name = aten::kLayerNormBackward, .check = check_layer_norm_backward});
  ops.add(Operator{.name = aten::kRmsNormBackward, .check = check_rms_norm_backward});
  ops.add(Operator{.name = "aten::_weight_norm_interface", .check = check_weight_norm});
  ops.add(Operator{
      .name = "aten::_weight_norm_interface_backward",
      .check = check_weight_norm_backward,
  });
}

}  // namespace torch_ort::ops
