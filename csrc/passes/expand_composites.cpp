// Expresses norms, softmax, losses and dropout, and their backward operators, in the small language
// of fused regions (ops/fusion.h), so that fuse_regions can fuse them with the nodes around them.
// Only where a region can run them: for floating-point tensors of known rank on a device with a
// code generator.

#include "ir/edit.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/channels_last.h"
#include "ops/formula.h"
#include "ops/fusion.h"
#include "ops/normalization.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/softmax.h"
#include "ops/sorted_sums.h"
#include "ops/writer.h"
#include "passes/arguments.h"
#include "passes/context.h"
#include "passes/dropout.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"
#include "region/codegen.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace torch_ort::passes {

namespace {

using ir::Dim;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Type;
using ir::Value;

// Whether the second Transpose undoes the first one.
bool undoes(const Node& second, const Node& first) {
  if (!ir::is(&second, "Transpose") || !ir::is(&first, "Transpose")) return false;
  const Shape back = ir::ints_attr(second.attrs, "perm", {});
  const Shape order = ir::ints_attr(first.attrs, "perm", {});
  if (back.size() != order.size()) return false;
  for (size_t i = 0; i < back.size(); ++i) {
    if (!(order.at(back[i].constant()) == ir::Dim(static_cast<int64_t>(i)))) return false;
  }
  return true;
}

// Writes the nodes that replace a node, in front of it. They compute in float32, or in float64 for
// float64.
class Expander : public ops::Writer {
 public:
  Expander(Graph& graph, Node& node, const Value& like)
      : Writer(graph, &node, node.name),
        node_(node),
        dtype_(ops::computed_dtype(like.type.dtype)),
        formula_(*this, dtype_, ops::Reader::kRegion) {}

  // The formula writer that shares this dtype and position.
  ops::Formula& formula() { return formula_; }

  // A value of the graph, cast to the dtype that the formulas compute in.
  Value* number(Value* value) { return formula_.number(value); }

  Value* constant(double number) { return formula_.constant(number); }

  Value* ones(const Shape& shape) {
    const int64_t count = ir::numel(shape).constant();
    std::vector<std::byte> bytes;
    const auto one = ops::scalar_data(1.0, dtype_);
    for (int64_t i = 0; i < count; ++i) {
      bytes.insert(bytes.end(), one->bytes, one->bytes + one->num_bytes);
    }
    std::vector<int64_t> sizes;
    for (const Dim& dim : shape) sizes.push_back(dim.constant());
    return &ir::add_initializer(graph(), "ones", {.dtype = dtype_, .shape = shape},
                                ir::make_tensor_data(dtype_, sizes, std::move(bytes)));
  }

  // factor * numerator / denominator
  Value* ratio(double factor, const Dim& numerator, const Dim& denominator) {
    if (numerator.is_constant() && denominator.is_constant()) {
      return constant(factor * static_cast<double>(numerator.constant()) /
                      static_cast<double>(denominator.constant()));
    }
    return make_ours("SizeRatio", {}, {.dtype = dtype_, .shape = Shape{}},
                     {{"denominator", denominator}, {"factor", factor}, {"numerator", numerator}});
  }

  // x * factor + offset, in the shape of `x`.
  Value* mul_add(Value* x, Value* factor, Value* offset) {
    return make_ours("MulAdd", {x, factor, offset}, typed(*x->type.shape, *x));
  }

  Value* sum_all(Value* value) { return make("ReduceSum", {value}, {{"keepdims", ir::Dim(0)}}); }

  // All readers of an output of the node now read `value`.
  void replace(size_t output, Value* value) {
    if (!is_read(node_, output)) return;
    ir::replace_uses(*node_.outputs[output], *cast(value, node_.outputs[output]->type.dtype),
                     graph());
  }

  // As replace(), for a value that is computed element by element: it gets the strides of the old
  // output.
  void replace_elements(size_t output, Value* value) {
    if (!is_read(node_, output)) return;
    Value& old = *node_.outputs[output];
    Value* made = cast(value, old.type.dtype);
    if (made->type.shape == old.type.shape) made->type.strides = old.type.strides;
    ir::replace_uses(old, *made, graph());
  }

  // As replace(), for a value of which `view` makes the output by a transpose. A reader that undoes
  // the transpose reads the value itself.
  template <typename View>
  void replace_view(size_t output, Value* value, View view) {
    if (!is_read(node_, output)) return;
    Value& old = *node_.outputs[output];
    Value* made = view(cast(value, old.type.dtype));
    ir::replace_uses(old, *made, graph());
    const Node& maker = *made->producer;
    const std::vector<ir::Use> uses = made->uses;
    for (const ir::Use& use : uses) {
      if (use.node == nullptr || !undoes(*use.node, maker)) continue;
      ir::replace_uses(*use.node->outputs[0], *maker.inputs[0], graph());
    }
  }

  // As replace(), but readers inside of the graph get the value in the dtype in which it was
  // computed; it is rounded only where it leaves the graph.
  void replace_statistic(size_t output, Value* value) {
    if (!is_read(node_, output)) return;
    Value& old = *node_.outputs[output];
    const bool leaves = std::any_of(old.uses.begin(), old.uses.end(), [](const ir::Use& use) {
      return use.node == nullptr || ir::is(use.node, "YieldOp", ir::kMicrosoftDomain);
    });
    ir::replace_uses(old, leaves ? *cast(value, old.type.dtype) : *value, graph());
  }

  // The type of a value with this shape in the dtype that the formulas compute in.
  Type typed(const Shape& shape, const Value& like) const {
    return {.dtype = dtype_, .shape = shape, .device = like.type.device};
  }

 private:
  Node& node_;
  DType dtype_;
  ops::Formula formula_;
};

// The axes from `begin` to before `end`.
Shape range(int64_t begin, int64_t end) {
  Shape axes;
  for (int64_t axis = begin; axis < end; ++axis) axes.push_back(axis);
  return axes;
}

int64_t rank_of(const Value& value) { return static_cast<int64_t>(value.type.shape->size()); }

bool has_no_elements(const Value& value) {
  if (!value.type.shape) return false;
  return std::find(value.type.shape->begin(), value.type.shape->end(), Dim(0)) !=
         value.type.shape->end();
}

bool is_last_axis(int64_t axis, const Value& value) {
  return rank_of(value) > 0 && (axis == -1 || axis == rank_of(value) - 1);
}

// ---- norms

// How many of the last dims a norm goes over.
int64_t num_normalized(const ops::Arg& shape) {
  return static_cast<int64_t>(std::get<ops::ArgList>(shape.value).size());
}

struct LayerNorm {
  Value *x, *weight, *bias;
  Shape columns;
  double epsilon;
};

bool write_layer_norm(Graph& graph, Node& node, const LayerNorm& norm) {
  if (!is_fusible_float(norm.x) || norm.columns.empty() || norm.columns.front().constant() <= 0)
    return false;
  Expander write(graph, node, *norm.x);
  ops::Formula& f = write.formula();
  const auto [result, mean, deviation] =
      ops::layer_norm(f, norm.x, norm.columns, norm.epsilon, norm.weight, norm.bias);
  write.replace(0, result);
  write.replace_statistic(1, mean);
  write.replace_statistic(2, f.reciprocal(deviation));
  return true;
}

bool expand_layer_norm(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || node.inputs.size() < 2) return false;
  const int64_t rank = rank_of(*x), axis = ir::int_attr(node.attrs, "axis", -1);
  Value* bias = ops::has_input(node, 2) ? node.inputs[2] : nullptr;
  return write_layer_norm(graph, node,
                          {x, node.inputs[1], bias, range(axis < 0 ? axis + rank : axis, rank),
                           ir::float_attr(node.attrs, "epsilon", 1e-5)});
}

// A norm whose weight and input have different dtypes.
bool expand_native_layer_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const auto* epsilon = std::get_if<double>(&call.args.at(4).value);
  if (!is_fusible_float(x) || epsilon == nullptr) return false;
  return write_layer_norm(
      graph, node,
      {x, tensor(call.args.at(2)), tensor(call.args.at(3)),
       range(rank_of(*x) - num_normalized(call.args.at(1)), rank_of(*x)), *epsilon});
}

bool expand_layer_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *mean = tensor(call.args.at(3)), *rstd = tensor(call.args.at(4));
  Value* weight = tensor(call.args.at(5));
  if (!is_fusible_float(grad) || !is_fusible_float(x) || !is_fusible_float(mean) ||
      !is_fusible_float(rstd))
    return false;
  const int64_t rank = rank_of(*x);
  const int64_t normalized = num_normalized(call.args.at(2));
  if (normalized >= rank) return false;
  const Shape columns = range(rank - normalized, rank);
  const Shape rows = range(0, rank - normalized);

  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  rstd = f.number(rstd);
  Value* normal = ops::normalized(f, x, mean, rstd);
  if (is_read(node, 0)) {
    write.replace(0, ops::layer_norm_gradient(f, grad, weight, normal, rstd, columns));
  }
  if (is_read(node, 1)) {
    write.replace(1, ops::layer_norm_weight_gradient(f, grad, normal, rows));
  }
  if (is_read(node, 2)) write.replace(2, f.total(grad, rows));
  return true;
}

struct RmsNorm {
  Value *x, *weight;
  Shape columns;
  std::optional<double> epsilon;
};

// Without a number PyTorch takes the machine epsilon of the dtype that it computes in.
double machine_epsilon(DType dtype) {
  return dtype == DType::kDouble ? std::numeric_limits<double>::epsilon()
                                 : std::numeric_limits<float>::epsilon();
}

bool write_rms_norm(Graph& graph, Node& node, const RmsNorm& norm) {
  if (!is_fusible_float(norm.x) || norm.columns.empty() || norm.columns.front().constant() <= 0)
    return false;
  Expander write(graph, node, *norm.x);
  const double epsilon = norm.epsilon ? *norm.epsilon : machine_epsilon(norm.x->type.dtype);
  const auto [result, rstd] =
      ops::rms_norm(write.formula(), norm.x, norm.columns, epsilon, norm.weight);
  write.replace(0, result);
  write.replace_statistic(1, rstd);
  return true;
}

bool expand_rms_norm(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x)) return false;
  const int64_t rank = rank_of(*x), axis = ir::int_attr(node.attrs, "axis", -1);
  return write_rms_norm(graph, node,
                        {x, node.inputs.at(1), range(axis < 0 ? axis + rank : axis, rank),
                         ir::float_attr(node.attrs, "epsilon", 1e-5)});
}

// One that gives the factors of the rows as well, or has no weight or no epsilon.
bool expand_fused_rms_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value* x = tensor(call.args.at(0));
  const ops::Arg& given = call.args.at(3);
  const auto* epsilon = std::get_if<double>(&given.value);
  if (!is_fusible_float(x) || (epsilon == nullptr && !given.is_none())) return false;
  return write_rms_norm(graph, node,
                        {x, tensor(call.args.at(2)),
                         range(rank_of(*x) - num_normalized(call.args.at(1)), rank_of(*x)),
                         epsilon == nullptr ? std::nullopt : std::optional(*epsilon)});
}

bool expand_rms_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *rstd = tensor(call.args.at(3)), *weight = tensor(call.args.at(4));
  if (!is_fusible_float(grad) || !is_fusible_float(x) || !is_fusible_float(rstd)) return false;
  const int64_t rank = rank_of(*x), normalized = num_normalized(call.args.at(2));
  if (normalized >= rank) return false;

  Expander write(graph, node, *x);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  rstd = f.number(rstd);
  Value* normal = f.mul(f.number(x), rstd);
  const Shape columns = range(rank - normalized, rank), rows = range(0, rank - normalized);
  if (is_read(node, 0)) {
    write.replace(0, ops::rms_norm_gradient(f, grad, weight, normal, rstd, columns));
  }
  if (is_read(node, 1)) {
    write.replace(1, ops::layer_norm_weight_gradient(f, grad, normal, rows));
  }
  return true;
}

// ---- batch norm

// A batch (N, C, ...), either row-major or, for images, in channels-last layout.
struct Channels {
  Dim batch, channels, inner;
  bool is_last = false;
  Shape axes;  // of the inner dims

  Dim count() const { return ops::times(batch, inner); }
};

// Nothing for unbacked sizes, and where expanding gains nothing: if a channel of an image is one
// number.
std::optional<Channels> channels_of(const Graph& graph, const Value* x) {
  if (!is_fusible_float(x) || x->type.shape->size() < 3) return std::nullopt;
  const bool is_last = ops::has_channels_last(x->type);
  if ((x->type.strides && !is_last) || !KnownSizes(graph).are_known(*x)) return std::nullopt;
  const Shape& shape = *x->type.shape;
  Channels found{.batch = shape[0], .channels = shape[1], .is_last = is_last};
  found.axes = range(2, rank_of(*x));
  found.inner = ir::numel(Shape(shape.begin() + 2, shape.end()));
  return hinted_size(graph, found.inner) == 1 ? std::nullopt : std::optional(std::move(found));
}

// Whether the output has the layout of the input, or nobody reads it.
bool is_like(const Node& node, size_t output, const Channels& channels) {
  if (!is_read(node, output)) return true;
  const Type& type = node.outputs[output]->type;
  return channels.is_last ? ops::has_channels_last(type) : !type.strides;
}

// Writes computations over channels. In row-major batches a channel of an image is a row; in
// channels-last layout channels are columns, and pixels are rows.
class ChannelWriter {
 public:
  ChannelWriter(Expander& write, const Channels& channels) : write_(write), channels_(channels) {}

  // The operand in the order in which it is worked on: (N, C, H, W), or (N, H, W, C) for channels
  // last.
  Value* image(Value* x) {
    return write_.number(channels_.is_last ? transpose(x, ops::kToLast) : x);
  }
  // The value, in the order in which it is worked on, replaces an output of the node.
  void replace(size_t output, Value* x) {
    if (!channels_.is_last) return write_.replace(output, x);
    write_.replace_view(output, x, [this](Value* last) { return transpose(last, ops::kToFirst); });
  }
  // -> (C): sums over all images.
  Value* sum(Value* x) {
    if (channels_.is_last) return write_.reduce("ReduceSum", x, {0, 1, 2}, false);
    return sum_batch(sum_inner(x));
  }
  // x -> (N, C): sums over the inner dims.
  Value* sum_inner(Value* x) {
    if (channels_.is_last) return write_.reduce("ReduceSum", x, {1, 2}, false);
    return write_.reshape(write_.reduce("ReduceSum", x, channels_.axes, true),
                          {channels_.batch, channels_.channels});
  }
  // (N, C) -> (C)
  Value* sum_batch(Value* x) { return write_.reduce("ReduceSum", x, {0}, false); }
  // Reshapes (C) or (N, C) so that it broadcasts to x.
  Value* spread(Value* numbers) {
    const bool has_batch = numbers->type.shape->size() == 2;
    if (channels_.is_last && !has_batch) return numbers;
    Shape shape(channels_.axes.size(), Dim(1));
    shape.insert(channels_.is_last ? shape.end() : shape.begin(), channels_.channels);
    if (has_batch) shape.insert(shape.begin(), channels_.batch);
    return write_.reshape(numbers, shape);
  }
  Value* scale(Value* x, Value* factor) { return write_.make("Mul", {x, factor}); }
  // A part of x, from which its mean is estimated: the first images of the batch or, in
  // channels-last layout, the first rows of pixels of each image; one in n. Whatever the numbers
  // are, the mean of a part is at most sqrt(n) standard deviations away from the mean of all. So
  // sums of squared distances from it lose at most a factor of n + 1 of precision.
  Value* first_part(Value* x, int64_t axis) {
    constexpr int64_t kPart = 16;
    const Dim size = x->type.shape->at(axis), count = ops::ceil_div(size, kPart);
    if (count == size) return x;
    // If x is a cast, the slice is taken of its input: the cast then stays in registers.
    if (ir::is(x->producer, "Cast")) return write_.number(first_part(x->producer->inputs[0], axis));
    Shape shape = *x->type.shape;
    shape[axis] = count;
    return write_
        .add({"", "Slice"}, {x, write_.ints({0}), write_.ints({count}), write_.ints({axis})},
             {ops::view_type(x->type, shape, ops::strides_of(x->type))})
        .outputs[0];
  }

 private:
  // A transpose that undoes the one before it gives the input of that one.
  Value* transpose(Value* x, const int64_t (&order)[ops::kImageRank]) {
    Value* made = write_.transpose(x, Shape(std::begin(order), std::end(order)));
    const Node* maker = x->producer;
    return maker != nullptr && undoes(*made->producer, *maker) ? maker->inputs[0] : made;
  }

  Expander& write_;
  const Channels& channels_;
};

struct Moments {
  // The sum of the squared distances from the mean.
  Value *mean, *squares;
};

// The moments of each image and channel, in channels-last layout: from distances to the mean of a
// part.
Moments moments_of_images(Expander& write, ChannelWriter& by, const Channels& channels, Value* x) {
  Value* part = by.first_part(x, 1);
  const Dim pixels = ops::times(part->type.shape->at(1), part->type.shape->at(2));
  Value* near = by.scale(by.sum_inner(part), write.ratio(1, 1, pixels));
  Value* distance = write.make("Sub", {x, by.spread(near)});
  Value* sum = by.sum_inner(distance);
  Value* squares = by.sum_inner(write.make("Mul", {distance, distance}));
  Value* shift = by.scale(sum, write.ratio(1, 1, channels.inner));
  squares = write.make("Sub", {squares, write.make("Mul", {sum, shift})});
  return {write.make("Add", {near, shift}), write.make("Max", {squares, write.constant(0)})};
}

// The moments of each channel, from those of each image and channel (Chan et al., "Updating
// formulae and a pairwise algorithm for computing sample variances", 1979). This takes one pass
// over the batch.
Moments moments_of_rows(Expander& write, ChannelWriter& by, const Channels& channels, Value* x) {
  Value* image_mean = by.scale(by.sum_inner(x), write.ratio(1, 1, channels.inner));
  Value* centered = write.make("Sub", {x, by.spread(image_mean)});
  Value* image_squares = by.sum_inner(write.make("Mul", {centered, centered}));
  Value* mean = by.scale(by.sum_batch(image_mean), write.ratio(1, 1, channels.batch));
  Value* shift = write.make("Sub", {image_mean, mean});
  Value* shift_squares =
      by.scale(write.make("Mul", {shift, shift}), write.ratio(1, channels.inner, 1));
  return {mean, by.sum_batch(write.make("Add", {image_squares, shift_squares}))};
}

// The moments of each channel, from distances to the mean of a part of the batch. This takes one
// pass over the batch and that part.
Moments moments_of_columns(Expander& write, ChannelWriter& by, const Channels& channels, Value* x) {
  Value* near = write.reduce("ReduceMean", by.first_part(x, 0), {0, 1, 2}, false);
  Value* distance = write.make("Sub", {x, near});
  Value* sum = by.sum(distance);
  Value* squares = by.sum(write.make("Mul", {distance, distance}));
  Value* shift = by.scale(sum, write.ratio(1, 1, channels.count()));
  squares = write.make("Sub", {squares, write.make("Mul", {sum, shift})});
  return {write.make("Add", {near, shift}), write.make("Max", {squares, write.constant(0)})};
}

bool expand_batch_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *x = tensor(call.args.at(0)), *weight = tensor(call.args.at(1));
  Value *bias = tensor(call.args.at(2)), *running_mean = tensor(call.args.at(3));
  Value* running_variance = tensor(call.args.at(4));
  const auto* training = std::get_if<bool>(&call.args.at(5).value);
  const auto* momentum = std::get_if<double>(&call.args.at(6).value);
  const auto* epsilon = std::get_if<double>(&call.args.at(7).value);
  const std::optional<Channels> channels = channels_of(graph, x);
  if (!channels || training == nullptr || !*training || momentum == nullptr || epsilon == nullptr ||
      node.outputs[0] == nullptr || !is_like(node, 0, *channels)) {
    return false;
  }
  Expander write(graph, node, *x);
  ChannelWriter by(write, *channels);
  Value* numbers = by.image(x);
  const auto [mean, squares] = channels->is_last ? moments_of_columns(write, by, *channels, numbers)
                                                 : moments_of_rows(write, by, *channels, numbers);
  const Dim count = channels->count();
  Value* variance = by.scale(squares, write.ratio(1, 1, count));
  ops::Formula& f = write.formula();
  Value* rstd = f.rsqrt(f.add(variance, f.constant(*epsilon)));

  Value* factor = weight == nullptr ? rstd : write.make("Mul", {rstd, write.number(weight)});
  Value* offset = write.make("Neg", {write.make("Mul", {mean, factor})});
  if (bias != nullptr) offset = write.make("Add", {offset, write.number(bias)});
  by.replace(0, write.mul_add(numbers, by.spread(factor), by.spread(offset)));
  write.replace_statistic(1, mean);
  write.replace_statistic(2, rstd);
  const auto update = [&](size_t output, Value* running, Value* now, const Dim& divisor) {
    if (running == nullptr) return;
    Value* kept = by.scale(write.number(running), write.constant(1 - *momentum));
    Value* share = by.scale(now, write.ratio(*momentum, 1, divisor));
    write.replace(output, write.make("Add", {kept, share}));
  };
  update(3, running_mean, mean, 1);
  update(4, running_variance, squares, ops::minus(count, 1));
  return true;
}

bool expand_batch_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *weight = tensor(call.args.at(2)), *mean = tensor(call.args.at(5));
  Value* rstd = tensor(call.args.at(6));
  const auto* training = std::get_if<bool>(&call.args.at(7).value);
  const std::optional<Channels> channels = channels_of(graph, x);
  const std::optional<Channels> of_grad = channels_of(graph, grad);
  const bool is_plain = channels && of_grad && channels->is_last == of_grad->is_last &&
                        is_fusible_float(mean) && is_fusible_float(rstd) && training != nullptr &&
                        *training;
  if (!is_plain || !is_like(node, 0, *channels)) return false;
  Expander write(graph, node, *x);
  ChannelWriter by(write, *channels);
  grad = by.image(grad);
  mean = write.number(mean);
  rstd = write.number(rstd);
  Value* numbers = by.image(x);
  Value* centered = write.make("Sub", {numbers, by.spread(mean)});
  Value* sum = by.sum(grad);
  Value* sum_along = by.sum(write.make("Mul", {grad, centered}));
  if (is_read(node, 0)) {
    // The gradient is (grad - mean grad - centered * along) * factor. It is written as grad and
    // centered times one number for each channel, plus a third number. Expanding `centered` as well
    // would cancel digits if the mean of x is far from 0. `centered` is computed again from x,
    // because the sums must be complete before.
    Value* factor = weight == nullptr ? rstd : write.make("Mul", {rstd, write.number(weight)});
    Value* share = write.ratio(1, 1, channels->count());
    Value* along = write.make("Mul", {by.scale(sum_along, share), write.make("Mul", {rstd, rstd})});
    Value* of_centered = write.make("Neg", {write.make("Mul", {along, factor})});
    Value* rest = write.make("Neg", {write.make("Mul", {by.scale(sum, share), factor})});
    Value* again = write.make("Sub", {numbers, by.spread(mean)});
    Value* from_x = write.mul_add(again, by.spread(of_centered), by.spread(rest));
    by.replace(0, write.mul_add(grad, by.spread(factor), from_x));
  }
  write.replace(1, write.make("Mul", {sum_along, rstd}));
  write.replace(2, sum);
  return true;
}

// ---- group norm

// Channels-last images (N, C, H, W) whose channels are divided into groups: C = G * D.
struct Groups {
  Channels channels;
  int64_t count = 1, size = 1;  // G, D

  Shape shape() const { return {channels.batch, count, size}; }
  Dim num_numbers() const { return ops::times(channels.inner, size); }
};

// Nothing where PyTorch's kernels are as fast: for row-major tensors, and for dtypes of four bytes
// or more. For short floats in channels-last layout PyTorch's gradient takes many times longer.
std::optional<Groups> groups_of(const Graph& graph, const Value* x, int64_t count) {
  std::optional<Channels> channels = channels_of(graph, x);
  if (!channels || !channels->is_last || ir::size_bytes(x->type.dtype) >= 4) return std::nullopt;
  if (!channels->channels.is_constant() || count <= 0) return std::nullopt;
  const int64_t size = channels->channels.constant() / count;
  if (size == 0 || size * count != channels->channels.constant()) return std::nullopt;
  return Groups{std::move(*channels), count, size};
}

// Writes computations on the small tensors between the passes over images: one number for each
// image and channel as (N, G, D), or for each image and group as (N, G, 1).
class GroupWriter {
 public:
  GroupWriter(Expander& write, const Groups& groups) : write_(write), groups_(groups) {}

  // (N, C) -> (N, G, D)
  Value* split(Value* numbers) { return write_.reshape(numbers, groups_.shape()); }
  // (N, G, D) -> (N, C)
  Value* join(Value* numbers) {
    return write_.reshape(numbers, {groups_.channels.batch, groups_.channels.channels});
  }
  // (N, G) -> (N, G, 1), and back
  Value* of_group(Value* numbers) {
    return write_.reshape(write_.number(numbers), {groups_.channels.batch, groups_.count, 1});
  }
  Value* statistic(Value* numbers) {
    return write_.reshape(numbers, {groups_.channels.batch, groups_.count});
  }
  // (C) -> (1, G, D); ones if there is no such parameter.
  Value* of_channel(Value* numbers) {
    const Shape shape = {1, groups_.count, groups_.size};
    return numbers == nullptr ? ones() : write_.reshape(write_.number(numbers), shape);
  }
  // (N, G, 1) -> (N, G, D). A product with ones can be fused with the nodes around it; an Expand
  // would be a copy of its own.
  Value* repeat(Value* numbers) { return write_.make("Mul", {numbers, ones()}); }
  // (N, G, D) -> (N, G, 1)
  Value* sum(Value* numbers) { return write_.reduce("ReduceSum", numbers, {2}, true); }
  Value* mean(Value* numbers) { return write_.reduce("ReduceMean", numbers, {2}, true); }

 private:
  Value* ones() {
    if (ones_ == nullptr) ones_ = write_.ones(Shape{1, 1, groups_.size});
    return ones_;
  }

  Expander& write_;
  const Groups& groups_;
  Value* ones_ = nullptr;
};

// The moments of each group, from those of each image and channel (Chan et al., as above).
Moments moments_of_groups(Expander& write, ChannelWriter& by, GroupWriter& small,
                          const Groups& groups, Value* x) {
  const Moments of_channels = moments_of_images(write, by, groups.channels, x);
  Value* channel_mean = small.split(of_channels.mean);
  Value* mean = small.mean(channel_mean);
  Value* shift = write.make("Sub", {channel_mean, mean});
  Value* shift_squares = write.make("Mul", {shift, shift});
  Value* scaled = by.scale(shift_squares, write.ratio(1, groups.channels.inner, 1));
  return {mean, small.sum(write.make("Add", {small.split(of_channels.squares), scaled}))};
}

struct GroupNorm {
  Value *x, *weight, *bias;
  int64_t num_groups;
  double epsilon;
};

bool write_group_norm(Graph& graph, Node& node, const GroupNorm& norm) {
  const std::optional<Groups> groups = groups_of(graph, norm.x, norm.num_groups);
  if (!groups || node.outputs[0] == nullptr || !is_like(node, 0, groups->channels)) return false;
  Expander write(graph, node, *norm.x);
  ChannelWriter by(write, groups->channels);
  GroupWriter small(write, *groups);
  Value* numbers = by.image(norm.x);
  const auto [mean, squares] = moments_of_groups(write, by, small, *groups, numbers);
  Value* variance = by.scale(squares, write.ratio(1, 1, groups->num_numbers()));
  ops::Formula& f = write.formula();
  Value* rstd = f.rsqrt(f.add(variance, f.constant(norm.epsilon)));

  Value* factor = write.make("Mul", {rstd, small.of_channel(norm.weight)});
  Value* offset = write.make("Neg", {write.make("Mul", {mean, factor})});
  if (norm.bias != nullptr) offset = write.make("Add", {offset, small.of_channel(norm.bias)});
  by.replace(0,
             write.mul_add(numbers, by.spread(small.join(factor)), by.spread(small.join(offset))));
  write.replace_statistic(1, small.statistic(mean));
  write.replace_statistic(2, small.statistic(rstd));
  return true;
}

bool expand_group_norm(Graph& graph, Node& node) {
  if (node.inputs.size() != 3) return false;
  return write_group_norm(
      graph, node,
      {node.inputs[0], node.inputs[1], node.inputs[2], ir::int_attr(node.attrs, "num_groups", 1),
       ir::float_attr(node.attrs, "epsilon", 1e-5)});
}

// The operator of norms whose statistics are read or that have no weight.
bool expand_native_group_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  const auto* epsilon = std::get_if<double>(&call.args.at(7).value);
  if (epsilon == nullptr) return false;
  return write_group_norm(graph, node,
                          {tensor(call.args.at(0)), tensor(call.args.at(1)),
                           tensor(call.args.at(2)), integer(call.args.at(6)), *epsilon});
}

bool expand_group_norm_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *mean = tensor(call.args.at(2)), *rstd = tensor(call.args.at(3));
  Value* weight = tensor(call.args.at(4));
  const int64_t num_groups = integer(call.args.at(8));
  const std::optional<Groups> groups = groups_of(graph, x, num_groups);
  const std::optional<Groups> of_grad = groups_of(graph, grad, num_groups);
  const bool fits = groups && of_grad && is_fusible_float(mean) && is_fusible_float(rstd);
  if (!fits || !is_like(node, 0, groups->channels)) return false;
  Expander write(graph, node, *x);
  ChannelWriter by(write, groups->channels);
  GroupWriter small(write, *groups);
  mean = small.of_group(mean);
  rstd = small.of_group(rstd);
  grad = by.image(grad);
  Value* numbers = by.image(x);
  const auto spread = [&](Value* of_channels) { return by.spread(small.join(of_channels)); };
  // Computed twice: once before the sums and once after them. With a shared node, a tensor of the
  // size of the images would be written to memory between the two passes.
  const auto center = [&] { return write.make("Sub", {numbers, spread(small.repeat(mean))}); };
  Value* centered = center();
  Value* sum = by.sum_inner(grad);
  Value* along = small.split(by.sum_inner(write.make("Mul", {grad, centered})));
  if (is_read(node, 0)) {
    // As for batch norm, with the means of groups instead of channels.
    Value* scale = small.of_channel(weight);
    Value* share = write.ratio(1, 1, groups->num_numbers());
    const auto mean_of_group = [&](Value* sums) {
      return by.scale(small.sum(write.make("Mul", {sums, scale})), share);
    };
    Value* cube = write.make("Mul", {write.make("Mul", {rstd, rstd}), rstd});
    Value* of_centered = write.make("Neg", {write.make("Mul", {mean_of_group(along), cube})});
    Value* rest = write.make("Neg", {write.make("Mul", {mean_of_group(small.split(sum)), rstd})});
    Value* from_x =
        write.mul_add(center(), spread(small.repeat(of_centered)), spread(small.repeat(rest)));
    Value* factor = write.make("Mul", {rstd, scale});
    by.replace(0, write.mul_add(grad, spread(factor), from_x));
  }
  if (is_read(node, 1)) {
    Value* of_images = small.join(write.make("Mul", {along, rstd}));
    write.replace(1, by.sum_batch(of_images));
  }
  if (is_read(node, 2)) write.replace(2, by.sum_batch(sum));
  return true;
}

// ---- labels of rows

ir::Attrs ignored(const ops::Arg& index) { return {{"ignore_index", ir::Dim(integer(index))}}; }

// 1 for each row, but 0 for rows with the ignored label.
Value* find_valid(Expander& write, Value* label, const Type& row, const ir::Attrs& attrs) {
  return write.make_ours("RowValid", {label}, row, attrs);
}

// `numbers`, one for each row or one for all, but 0 for rows with the ignored label.
Value* keep_valid(Expander& write, Value* numbers, Value* valid) {
  return write.make("Where", {write.cast(valid, DType::kBool), numbers, write.constant(0)});
}

// The node that computes `x` by subtracting one number for each row from a matrix, if `x` is made
// so.
const Node* subtracts_from_rows(const Value& x) {
  const Node* node = x.producer;
  if (!ir::is(node, "Sub")) return nullptr;
  const Type &from = node->inputs[0]->type, &numbers = node->inputs[1]->type;
  const bool is_wide = x.type.dtype == DType::kFloat || x.type.dtype == DType::kDouble;
  const bool is_by_row = from.shape && numbers.shape && *from.shape == *x.type.shape &&
                         *numbers.shape == Shape{x.type.shape->at(0), Dim(1)};
  return is_wide && is_by_row ? node : nullptr;
}

// In each row of a matrix, the element that the label selects; an unspecified one for the ignored
// label. If the matrix was made by subtracting a number from each row, only the selected elements
// are subtracted from, so that the whole matrix need not be computed.
Value* pick(Expander& write, Value* x, Value* label, const Type& row, const ir::Attrs& attrs) {
  const Node* node = subtracts_from_rows(*x);
  if (node == nullptr) {
    return write.make_ours("RowPick", {write.number(x), label}, row, attrs);
  }
  Value* numbers = write.reshape(node->inputs[1], *row.shape);
  return write.make("Sub", {pick(write, node->inputs[0], label, row, attrs), numbers});
}

// ---- softmax

bool expand_softmax(Graph& graph, Node& node) {
  Value* x = node.inputs[0];
  if (!is_fusible_float(x) || !is_last_axis(ir::int_attr(node.attrs, "axis", -1), *x)) return false;
  const auto formula = node.op.name == "LogSoftmax" ? ops::log_softmax : ops::softmax;
  Expander write(graph, node, *x);
  write.replace(0, formula(write.formula(), x, {rank_of(*x) - 1}));
  return true;
}

// (..., columns) -> (..., 1). The gradient of a loss has one nonzero element in each row, which is
// then the sum of the row.
Value* sum_of_rows(Expander& write, Value* grad) {
  const Node* maker = grad->producer;
  if (!ir::is(maker, "RowScatter", ir::kTorchOrtDomain)) {
    return write.reduce("ReduceSum", grad, {rank_of(*grad) - 1}, true);
  }
  Value *label = maker->inputs[0], *numbers = maker->inputs[1];
  const Dim& rows = label->type.shape->at(0);
  const Type row = write.typed(*label->type.shape, *grad);
  Value* sum = keep_valid(write, numbers, find_valid(write, label, row, maker->attrs));
  return write.reshape(sum, {rows, Dim(1)});
}

bool expand_softmax_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *result = tensor(call.args.at(1));
  if (!is_fusible_float(grad) || !is_fusible_float(result)) return false;
  if (!is_last_axis(integer(call.args.at(2)), *result)) return false;

  Expander write(graph, node, *result);
  ops::Formula& f = write.formula();
  grad = f.number(grad);
  result = f.number(result);
  if (call.op == ops::aten::kLogSoftmaxBackward) {
    write.replace(0, ops::log_softmax_gradient(f, grad, result, sum_of_rows(write, grad)));
  } else {
    write.replace(0, ops::softmax_gradient(f, grad, result, {rank_of(*result) - 1}));
  }
  return true;
}

// ---- losses

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

// Whether the loss takes rows of log-probabilities and one label for each, without weights.
bool is_plain_nll(const Value* x, const Value* target, const Value* weight) {
  return is_fusible_float(x) && rank_of(*x) == 2 && weight == nullptr && target != nullptr &&
         target->type.is_known() && target->type.dtype == DType::kInt64 && rank_of(*target) == 1;
}

bool expand_nll(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *x = tensor(call.args.at(0)), *target = tensor(call.args.at(1));
  if (!is_plain_nll(x, target, tensor(call.args.at(2)))) return false;
  const int64_t reduction = integer(call.args.at(3));
  if (reduction == kNone) return false;

  Expander write(graph, node, *x);
  const ir::Attrs attrs = ignored(call.args.at(4));
  const Type row = write.typed(*target->type.shape, *x);
  Value* picked = pick(write, x, target, row, attrs);
  Value* valid = find_valid(write, target, row, attrs);
  if (subtracts_from_rows(*x) != nullptr) picked = keep_valid(write, picked, valid);
  Value *loss = write.sum_all(picked), *count = write.sum_all(valid);
  if (reduction == kMean) loss = write.make("Div", {loss, count});
  write.replace(0, write.make("Neg", {loss}));
  write.replace(1, count);
  return true;
}

bool expand_nll_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *x = tensor(call.args.at(1));
  Value *target = tensor(call.args.at(2)), *count = tensor(call.args.at(6));
  if (!is_plain_nll(x, target, tensor(call.args.at(3))) || !is_fusible_float(grad)) return false;
  const int64_t reduction = integer(call.args.at(4));

  Expander write(graph, node, *x);
  grad = write.number(grad);
  if (reduction == kMean) grad = write.make("Div", {grad, write.number(count)});
  write.replace(0, write.make_ours("RowScatter", {target, write.make("Neg", {grad})},
                                   write.typed(*x->type.shape, *x), ignored(call.args.at(5))));
  return true;
}

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

// ---- embedding

// The engine's kernels write into planned memory, whereas PyTorch's allocate tensors.
bool expand_embedding_backward(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  Value *grad = tensor(call.args.at(0)), *ids = tensor(call.args.at(1));
  const auto* by_frequency = std::get_if<bool>(&call.args.at(4).value);
  const Value* result = node.outputs.at(0);
  const region::KernelRow* kernel = region::kernel_for(grad, "EmbeddingGrad");
  if (!is_fusible_float(grad) || kernel == nullptr || ids == nullptr || !ids->type.is_known() ||
      by_frequency == nullptr || *by_frequency || result == nullptr || !result->type.is_known() ||
      grad->type.shape->empty()) {
    return false;
  }
  const bool is_sorted = kernel->sorts_ids;
  const DType dtype = grad->type.dtype, id = ids->type.dtype;
  const bool has_dtypes =
      is_sorted ? id == DType::kInt64 || id == DType::kInt32
                : id == DType::kInt64 && (dtype == DType::kFloat || dtype == DType::kDouble);
  if (!has_dtypes || result->type.strides || !KnownSizes(graph).are_known(*grad)) return false;
  std::vector<Type> types = {result->type};
  if (is_sorted) {
    Shape of_ids = *grad->type.shape;
    of_ids.pop_back();
    types.push_back(ops::sorted_sums_workspace(ir::numel(of_ids), result->type, 0));
  }
  const auto* padding = std::get_if<ir::Dim>(&call.args.at(3).value);
  Expander write(graph, node, *grad);
  const Node& made = write.add({ir::kTorchOrtDomain, "EmbeddingGrad"}, {grad, ids}, types,
                               {{"padding_idx", padding == nullptr ? ir::Dim(-1) : *padding}});
  write.replace(0, made.outputs[0]);
  return true;
}

// ---- attention

bool has_heads(const KnownSizes& sizes, const Value* value) {
  return is_fusible_float(value) && region::has_kernel(value, "Attention") &&
         value->type.shape->size() == 4 && sizes.are_known(*value);
}

// Attention becomes the engine's own kernel, which writes into planned memory. The arguments after
// the tensors are dropout, is_causal, mask and scale.
bool expand_attention(Graph& graph, Node& node, const char* op, size_t num_tensors) {
  const ops::Call call = ops::decode_aten(node);
  const KnownSizes sizes(graph);
  std::vector<Value*> inputs;
  for (size_t i = 0; i < num_tensors; ++i) {
    inputs.push_back(tensor(call.args.at(i)));
    if (inputs[i] == nullptr) return false;
    const DType dtype = inputs[0]->type.dtype;
    const bool is_logarithm = i == 5;
    if (inputs[i]->type.dtype != (is_logarithm ? ops::computed_dtype(dtype) : dtype)) return false;
  }
  const auto argument = [&](size_t i) {
    return num_tensors + i < call.args.size() ? call.args[num_tensors + i] : ops::Arg();
  };
  const ops::Arg dropout = argument(0), is_causal = argument(1), mask = argument(2),
                 scale = argument(3);
  const auto* probability = std::get_if<double>(&dropout.value);
  if (probability == nullptr || *probability != 0) return false;
  const bool is_backward = num_tensors > 3;
  for (size_t i = 0; i < 3; ++i) {
    if (!has_heads(sizes, inputs[i + (is_backward ? 1 : 0)])) return false;
  }
  // Input 4 is the result of the forward half, which the engine's kernel does not need.
  if (is_backward) inputs.erase(inputs.begin() + 4);
  ir::Attrs attrs;
  if (const auto* causal = std::get_if<bool>(&is_causal.value); causal != nullptr && *causal) {
    attrs["is_causal"] = ir::Dim(1);
  }
  if (const auto* factor = std::get_if<double>(&scale.value)) {
    attrs["scale"] = *factor;
  } else if (!scale.is_none()) {
    return false;
  }
  if (Value* added = tensor(mask)) {
    const DType dtype = inputs[0]->type.dtype;
    const bool fits = added->type.dtype == dtype || added->type.dtype == ops::computed_dtype(dtype);
    if (!fits || !sizes.are_known(*added)) return false;
    inputs.push_back(added);
  }
  std::vector<Type> types;
  for (const Value* output : node.outputs) {
    if (output == nullptr || !output->type.is_known()) return false;
    types.push_back(output->type);
  }
  if (types.size() != (is_backward ? 3 : 2)) return false;
  if (!is_backward && types[1].dtype != ops::computed_dtype(inputs[0]->type.dtype)) return false;
  Node& made = ops::Writer(graph, &node)
                   .add({ir::kTorchOrtDomain, op}, std::move(inputs), types, std::move(attrs));
  for (size_t i = 0; i < types.size(); ++i) {
    ir::replace_uses(*node.outputs[i], *made.outputs[i], graph);
  }
  return true;
}

bool expand_flash_attention(Graph& graph, Node& node) {
  return expand_attention(graph, node, "Attention", 3);
}

bool expand_flash_attention_backward(Graph& graph, Node& node) {
  return expand_attention(graph, node, "AttentionGrad", 6);
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

struct Expansion {
  const char* op;  // a standard op, or the operator of an ATen node
  bool (*expand)(Graph& graph, Node& node);
};

constexpr Expansion kExpansions[] = {
    {"Clip", expand_clip},
    {"Dropout", expand_dropout},
    {"GroupNormalization", expand_group_norm},
    {"LayerNormalization", expand_layer_norm},
    {"LogSoftmax", expand_softmax},
    {"Pow", expand_pow},
    {"RMSNormalization", expand_rms_norm},
    {"Softmax", expand_softmax},
    {ops::aten::kLogSoftmaxBackward, expand_softmax_backward},
    {ops::aten::kBatchNorm, expand_batch_norm},
    {ops::aten::kFlashAttention, expand_flash_attention},
    {ops::aten::kFlashAttentionBackward, expand_flash_attention_backward},
    {ops::aten::kSoftmaxBackward, expand_softmax_backward},
    {ops::aten::kDiv, expand_by_size},
    {ops::aten::kEmbeddingBackward, expand_embedding_backward},
    {ops::aten::kMul, expand_by_size},
    {ops::aten::kBatchNormBackward, expand_batch_norm_backward},
    {ops::aten::kDropoutBackward, expand_dropout_backward},
    {ops::aten::kGroupNorm, expand_native_group_norm},
    {ops::aten::kGroupNormBackward, expand_group_norm_backward},
    {ops::aten::kLayerNorm, expand_native_layer_norm},
    {ops::aten::kLayerNormBackward, expand_layer_norm_backward},
    {ops::aten::kNllLossBackward, expand_nll_backward},
    {ops::aten::kNllLoss, expand_nll},
    {ops::aten::kRmsNorm, expand_fused_rms_norm},
    {ops::aten::kRmsNormBackward, expand_rms_norm_backward},
    {ops::aten::kRsqrt, expand_rsqrt},
};

const Expansion* find_expansion(const Node& node) {
  if (node.is_erased() || node.inputs.empty() || node.inputs[0] == nullptr) return nullptr;
  // A node without elements stays as it is: a step of its expansion, such as the largest of no
  // numbers, might be undefined where the operator itself is not.
  if (has_no_elements(*node.inputs[0])) return nullptr;
  const bool is_aten = ir::is(&node, "ATen", ir::kAtenDomain);
  if (!is_aten && !node.op.domain.empty()) return nullptr;
  const std::string key = is_aten ? ir::string_attr(node.attrs, "operator", "") : node.op.name;
  const auto* found = std::find_if(std::begin(kExpansions), std::end(kExpansions),
                                   [&](const Expansion& each) { return key == each.op; });
  return found == std::end(kExpansions) ? nullptr : found;
}

}  // namespace

int expand_composites(Graph& graph, PassContext& context) {
  int rewrites = 0;
  for (auto node = graph.nodes.begin(); node != graph.nodes.end(); ++node) {
    const Expansion* expansion = find_expansion(*node);
    if (expansion == nullptr) continue;
    if (!context.may_rewrite()) return rewrites;
    if (!expansion->expand(graph, *node)) {
      context.did_not_rewrite();
      continue;
    }
    ir::erase(graph, *node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
