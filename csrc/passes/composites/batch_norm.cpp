// Batch norm, over the images of a batch.
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "passes/arguments.h"
#include "passes/composites/channels.h"

namespace torch_ort::passes::composites {

namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::Value;

// The moments of each channel, from those of each image and channel (Chan et al., "Updating
// formulae and a pairwise algorithm for computing sample variances", 1979). This takes one pass
// over the batch.
SplitMoments moments_of_rows(Expander& write, ChannelWriter& by, const Channels& channels,
                             Value* x) {
  const SplitMoments of_images = moments_of_images(write, by, channels, x);
  // Distances from the mean of the first image are small beside the deviation of all numbers.
  Value* middle = write.reshape(by.first(of_images.near, 0, 1), {channels.channels});
  Value* to_near = write.make("Sub", {of_images.near, middle});
  Value* from_middle = write.make("Add", {to_near, of_images.rest});
  Value* per_image = write.ratio(1, 1, channels.batch);
  Value* rest = by.scale(by.sum_batch(from_middle), per_image);
  Value* mean = write.make("Add", {middle, rest});

  Value* shift = write.make("Sub", {from_middle, rest});  // of the unrounded means
  Value* pixels = write.ratio(1, channels.inner, 1);
  Value* shift_squares = by.scale(write.make("Mul", {shift, shift}), pixels);
  Value* squares_around = by.sum_batch(write.make("Add", {of_images.whole.squares, shift_squares}));
  return {{mean, squares_around}, middle, rest};
}

// The moments of each channel, from distances to the mean of a part of the batch. This takes one
// pass over the batch and that part.
SplitMoments moments_of_columns(Expander& write, ChannelWriter& by, const Channels& channels,
                                Value* x) {
  Value* near = write.reduce("ReduceMean", by.first_part(x, 0), by.pixels(0), false);
  Value* distance = write.make("Sub", {x, near});
  Value* sum = by.sum(distance);
  Value* squares = by.sum(write.make("Mul", {distance, distance}));
  return moments_around(write, near, sum, squares, channels.count());
}

// Statistics that a norm keeps over batches, if it does.
struct Running {
  Value *mean = nullptr, *variance = nullptr;
};

// `settings`: the arguments from `training` on, which are the last three.
bool expand_norm(Graph& graph, Node& node, const ops::Call& call, const Running& running,
                 size_t settings) {
  Value *x = tensor(call.args.at(0)), *weight = tensor(call.args.at(1));
  Value* bias = tensor(call.args.at(2));
  const auto* training = std::get_if<bool>(&call.args.at(settings).value);
  const auto* momentum = std::get_if<double>(&call.args.at(settings + 1).value);
  const auto* epsilon = std::get_if<double>(&call.args.at(settings + 2).value);
  const std::optional<Channels> channels = channels_of(graph, x);
  if (!channels || training == nullptr || !*training || momentum == nullptr || epsilon == nullptr ||
      node.outputs[0] == nullptr || !is_like(node, 0, *channels)) {
    return false;
  }
  Expander write(graph, node, *x);
  ChannelWriter by(write, *channels);
  Value* numbers = by.image(x);
  const SplitMoments moments = channels->is_last ? moments_of_columns(write, by, *channels, numbers)
                                                 : moments_of_rows(write, by, *channels, numbers);
  const Dim count = channels->count();
  Value* variance = by.scale(moments.whole.squares, write.ratio(1, 1, count));
  ops::Formula& f = write.formula();
  Value* rstd = f.rsqrt(f.add(variance, f.constant(*epsilon)));

  Value* factor = weight == nullptr ? rstd : write.make("Mul", {rstd, write.number(weight)});
  // The offset is rounded once: where the mean is far from 0, x * factor and the offset cancel
  // digits, and what is rounded in them is left.
  Value* offset = write.make("Neg", {moments.rest});
  offset = bias == nullptr ? write.make("Mul", {offset, factor})
                           : write.mul_add(offset, factor, write.number(bias));
  offset = write.mul_add(write.make("Neg", {moments.near}), factor, offset);
  Value* wide_offset = by.spread(offset);
  Value* wide_factor = by.spread(factor);
  by.replace(0, write.mul_add(numbers, wide_factor, wide_offset));
  write.replace(1, moments.whole.mean);
  write.replace(2, rstd);
  const auto update = [&](size_t output, Value* before, Value* now, const Dim& divisor) {
    if (before == nullptr) return;
    Value* kept = by.scale(write.number(before), write.constant(1 - *momentum));
    Value* share = by.scale(now, write.ratio(*momentum, 1, divisor));
    write.replace(output, write.make("Add", {kept, share}));
  };
  update(3, running.mean, moments.whole.mean, 1);
  update(4, running.variance, moments.whole.squares, ops::minus(count, 1));
  return true;
}

bool expand_batch_norm(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  return expand_norm(graph, node, call, {tensor(call.args.at(3)), tensor(call.args.at(4))}, 5);
}

bool expand_without_statistics(Graph& graph, Node& node) {
  const ops::Call call = ops::decode_aten(node);
  return call.overload == "no_stats" && expand_norm(graph, node, call, {}, 3);
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
  mean = write.statistic(mean);
  rstd = write.statistic(rstd);
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

constexpr Expansion kRows[] = {
    {ops::aten::kBatchNorm, expand_batch_norm},
    {ops::aten::kBatchNormWithoutStatistics, expand_without_statistics},
    {ops::aten::kBatchNormBackward, expand_batch_norm_backward},
};

}  // namespace

std::span<const Expansion> batch_norms() { return kRows; }

}  // namespace torch_ort::passes::composites
