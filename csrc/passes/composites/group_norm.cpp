// Group norm, over groups of the channels of an image.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "passes/arguments.h"
#include "passes/composites/channels.h"

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Shape;
using ir::Value;

// Images (N, C, ...) whose channels are divided into groups: C = G * D.
struct Groups {
  Channels channels;
  int64_t count = 1, size = 1;  // G, D

  bool are_single() const { return size == 1; }
  // One number for each image and channel, or for each image and group, by group. Where each
  // channel is a group, these are the same.
  Shape of_channels() const {
    return are_single() ? Shape{channels.batch, count} : Shape{channels.batch, count, size};
  }
  Shape of_groups() const { return are_single() ? of_channels() : Shape{channels.batch, count, 1}; }
  Dim num_numbers() const { return ops::times(channels.inner, size); }
};

// Nothing where PyTorch's kernels are as fast, if groups have several channels: for row-major
// tensors, and for dtypes of four bytes or more. For short floats in channels-last layout PyTorch's
// gradient takes many times longer.
std::optional<Groups> groups_of(const Graph& graph, const Value* x, int64_t count) {
  std::optional<Channels> channels = channels_of(graph, x);
  if (!channels || !channels->channels.is_constant() || count <= 0) return std::nullopt;
  const int64_t size = channels->channels.constant() / count;
  if (size == 0 || size * count != channels->channels.constant()) return std::nullopt;
  const bool is_slow = channels->is_last && ir::size_bytes(x->type.dtype) < 4;
  if (size > 1 && !is_slow) return std::nullopt;
  return Groups{std::move(*channels), count, size};
}

// Writes computations on the small tensors between the passes over images: one number for each
// image and channel as (N, G, D), or for each image and group as (N, G, 1); if each channel is a
// group, both as (N, C).
class GroupWriter {
 public:
  GroupWriter(Expander& write, const Groups& groups) : write_(write), groups_(groups) {}

  // (N, C) -> (N, G, D)
  Value* split(Value* numbers) { return shaped(numbers, groups_.of_channels()); }
  // (N, G, D) -> (N, C)
  Value* join(Value* numbers) {
    return shaped(numbers, {groups_.channels.batch, groups_.channels.channels});
  }
  // (N, G) -> (N, G, 1), and back
  Value* of_group(Value* numbers) { return shaped(write_.statistic(numbers), groups_.of_groups()); }
  Value* statistic(Value* numbers) {
    return shaped(numbers, {groups_.channels.batch, groups_.count});
  }
  // (C) -> (1, G, D)
  Value* of_channel(Value* numbers) {
    Shape shape = groups_.of_channels();
    shape[0] = 1;
    return shaped(write_.number(numbers), shape);
  }
  // Times a number for each channel; as it is if there is no such parameter.
  Value* scaled(Value* numbers, Value* factors) {
    if (factors != nullptr) return write_.make("Mul", {numbers, of_channel(factors)});
    return repeat(numbers);
  }
  // (N, G, 1) -> (N, G, D). A product with ones can be fused with the nodes around it; an Expand
  // would be a copy of its own.
  Value* repeat(Value* numbers) {
    return groups_.are_single() ? numbers : write_.make("Mul", {numbers, ones()});
  }
  // (N, G, D) -> (N, G, 1)
  Value* sum(Value* numbers) { return reduced("ReduceSum", numbers); }
  Value* mean(Value* numbers) { return reduced("ReduceMean", numbers); }

 private:
  Value* shaped(Value* numbers, const Shape& shape) {
    return *numbers->type.shape == shape ? numbers : write_.reshape(numbers, shape);
  }
  Value* reduced(const char* op, Value* numbers) {
    return groups_.are_single() ? numbers : write_.reduce(op, numbers, {2}, true);
  }
  Value* ones() {
    if (ones_ == nullptr) ones_ = write_.ones(Shape{1, 1, groups_.size});
    return ones_;
  }

  Expander& write_;
  const Groups& groups_;
  Value* ones_ = nullptr;
};

// The moments of each group, from those of each image and channel (Chan et al., as in
// batch_norm.cpp).
Moments moments_of_groups(Expander& write, ChannelWriter& by, GroupWriter& small,
                          const Groups& groups, Value* x) {
  const Moments of_channels = moments_of_images(write, by, groups.channels, x).whole;
  if (groups.are_single()) return of_channels;
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

  Value* factor = small.scaled(rstd, norm.weight);
  Value* offset = write.make("Neg", {write.make("Mul", {mean, factor})});
  if (norm.bias != nullptr) offset = write.make("Add", {offset, small.of_channel(norm.bias)});
  by.replace(0,
             write.mul_add(numbers, by.spread(small.join(factor)), by.spread(small.join(offset))));
  write.replace(1, small.statistic(mean));
  write.replace(2, small.statistic(rstd));
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
    Value* share = write.ratio(1, 1, groups->num_numbers());
    const auto mean_of_group = [&](Value* sums) {
      return by.scale(small.sum(small.scaled(sums, weight)), share);
    };
    // Large sums are scaled before they are multiplied by weights, so that no product overflows.
    Value* square = write.make("Mul", {rstd, rstd});
    Value* mean_along = mean_of_group(write.make("Mul", {along, square}));
    Value* of_centered = write.make("Neg", {write.make("Mul", {mean_along, rstd})});
    Value* mean_grad = mean_of_group(write.make("Mul", {small.split(sum), rstd}));
    Value* rest = write.make("Neg", {mean_grad});
    Value* from_x =
        write.mul_add(center(), spread(small.repeat(of_centered)), spread(small.repeat(rest)));
    Value* factor = small.scaled(rstd, weight);
    by.replace(0, write.mul_add(grad, spread(factor), from_x));
  }
  if (is_read(node, 1)) {
    Value* of_images = small.join(write.make("Mul", {along, rstd}));
    write.replace(1, by.sum_batch(of_images));
  }
  if (is_read(node, 2)) write.replace(2, by.sum_batch(sum));
  return true;
}

constexpr Expansion kRows[] = {
    {"GroupNormalization", expand_group_norm},
    {ops::aten::kGroupNorm, expand_native_group_norm},
    {ops::aten::kGroupNormBackward, expand_group_norm_backward},
};

}  // namespace

std::span<const Expansion> group_norms() { return kRows; }

}  // namespace torch_ort::passes::composites
