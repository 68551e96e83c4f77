// Computations over the channels of images, for norms.
#pragma once

#include "ops/channels_last.h"
#include "ops/shapes.h"
#include "passes/composites/expander.h"
#include "passes/known_sizes.h"
#include "passes/unread.h"

#include <limits>
#include <optional>

namespace torch_ort::passes::composites {

// A batch (N, C, ...), either row-major or, for images, in channels-last layout.
struct Channels {
  ir::Dim batch, channels, inner;
  bool is_last = false;
  ir::Shape axes;  // of the inner dims

  ir::Dim count() const { return ops::times(batch, inner); }
};

// Nothing for unbacked sizes, and where expanding gains nothing: if a channel of an image is one
// number.
inline std::optional<Channels> channels_of(const ir::Graph& graph, const ir::Value* x) {
  if (!is_fusible_float(x) || x->type.shape->size() < 3) return std::nullopt;
  const bool is_last = ops::has_channels_last(x->type);
  if ((x->type.strides && !is_last) || !KnownSizes(graph).are_known(*x)) return std::nullopt;
  const ir::Shape& shape = *x->type.shape;
  Channels found{.batch = shape[0], .channels = shape[1], .is_last = is_last};
  found.axes = range(2, ops::rank_of(*x));
  found.inner = ir::numel(ir::Shape(shape.begin() + 2, shape.end()));
  return hinted_size(graph, found.inner) == 1 ? std::nullopt : std::optional(std::move(found));
}

// Whether the output has the layout of the input, or nobody reads it.
inline bool is_like(const ir::Node& node, size_t output, const Channels& channels) {
  if (!is_read(node, output)) return true;
  const ir::Type& type = node.outputs[output]->type;
  return channels.is_last ? ops::has_channels_last(type) : !type.strides;
}

// Writes computations over channels. In row-major batches a channel of an image is a row; in
// channels-last layout channels are columns, and pixels are rows.
class ChannelWriter {
 public:
  ChannelWriter(Expander& write, const Channels& channels) : write_(write), channels_(channels) {}

  // The operand in the order in which it is worked on: (N, C, H, W), or (N, H, W, C) for channels
  // last.
  ir::Value* image(ir::Value* x) {
    return write_.number(channels_.is_last ? write_.transposed(x, ops::to_last(rank())) : x);
  }
  // The value, in the order in which it is worked on, replaces an output of the node.
  void replace(size_t output, ir::Value* x) {
    if (!channels_.is_last) return write_.replace(output, x);
    write_.replace_transposed(output, x, ops::to_first(rank()));
  }
  // -> (C): sums over all images.
  ir::Value* sum(ir::Value* x) {
    if (channels_.is_last) return write_.reduce("ReduceSum", x, pixels(0), false);
    return sum_batch(sum_inner(x));
  }
  // x -> (N, C): sums over the inner dims.
  ir::Value* sum_inner(ir::Value* x) {
    if (channels_.is_last) return write_.reduce("ReduceSum", x, pixels(1), false);
    return write_.reshape(write_.reduce("ReduceSum", x, channels_.axes, true),
                          {channels_.batch, channels_.channels});
  }
  // The axes of channels-last images from one on, without that of the channels.
  ir::Shape pixels(int64_t first) const { return range(first, static_cast<int64_t>(rank()) - 1); }
  // (N, C) -> (C)
  ir::Value* sum_batch(ir::Value* x) { return write_.reduce("ReduceSum", x, {0}, false); }
  // Reshapes (C) or (N, C) so that it broadcasts to x.
  ir::Value* spread(ir::Value* numbers) {
    const bool has_batch = numbers->type.shape->size() == 2;
    if (channels_.is_last && !has_batch) return numbers;
    ir::Shape shape(channels_.axes.size(), ir::Dim(1));
    shape.insert(channels_.is_last ? shape.end() : shape.begin(), channels_.channels);
    if (has_batch) shape.insert(shape.begin(), channels_.batch);
    return write_.reshape(numbers, shape);
  }
  ir::Value* scale(ir::Value* x, ir::Value* factor) { return write_.make("Mul", {x, factor}); }
  // A part of x, from which its mean is estimated: the first images of the batch or, in
  // channels-last layout, the first rows of pixels of each image; one in n. Whatever the numbers
  // are, the mean of a part is at most sqrt(n) standard deviations away from the mean of all. So
  // sums of squared distances from it lose at most a factor of n + 1 of precision.
  ir::Value* first_part(ir::Value* x, int64_t axis) {
    constexpr int64_t kPart = 16;
    const ir::Dim size = x->type.shape->at(axis), count = ops::ceil_div(size, kPart);
    if (count == size) return x;
    // If x is a cast, the slice is taken of its input: the cast then stays in registers.
    if (ir::is(x->producer, "Cast")) return write_.number(first_part(x->producer->inputs[0], axis));
    return first(x, axis, count);
  }
  // A view of the first `count` along an axis.
  ir::Value* first(ir::Value* x, int64_t axis, const ir::Dim& count) {
    ir::Shape shape = *x->type.shape;
    shape[axis] = count;
    return write_
        .add({"", "Slice"}, {x, write_.ints({0}), write_.ints({count}), write_.ints({axis})},
             {ops::view_type(x->type, shape, ops::strides_of(x->type))})
        .outputs[0];
  }

 private:
  size_t rank() const { return 2 + channels_.axes.size(); }

  Expander& write_;
  const Channels& channels_;
};

struct Moments {
  // The mean, and the sum of the squared distances from it.
  ir::Value *mean, *squares;
};
// Moments whose mean is near + rest, rounded.
struct SplitMoments {
  Moments whole;
  ir::Value *near, *rest;
};

// The moments of `count` numbers, from the sums of their distances to a number near their mean, and
// of the squares of these distances.
inline SplitMoments moments_around(Expander& write, ir::Value* near, ir::Value* sum,
                                   ir::Value* squares, const ir::Dim& count) {
  ir::Value* shift = write.make("Mul", {sum, write.ratio(1, 1, count)});
  // Squares that are too large for the dtype stay infinite: they are more than what is taken off.
  const double largest = sum->type.dtype == ir::DType::kDouble ? std::numeric_limits<double>::max()
                                                               : std::numeric_limits<float>::max();
  ir::Value* excess = write.make("Min", {write.make("Mul", {sum, shift}), write.constant(largest)});
  ir::Value* around = write.make("Sub", {squares, excess});
  ir::Value* mean = write.make("Add", {near, shift});
  return {{mean, write.make("Max", {around, write.constant(0)})}, near, shift};
}

// A number near the mean of each image and channel: the mean as far as rounding allows or, in
// channels-last layout, that of a part. A row of a row-major image is in the cache when it is read
// again.
inline ir::Value* near_mean(Expander& write, ChannelWriter& by, const Channels& channels,
                            ir::Value* x) {
  if (!channels.is_last) {
    ir::Value* share = write.ratio(1, 1, channels.inner);
    return by.scale(by.sum_inner(x), share);
  }
  ir::Value* part = by.first_part(x, 1);
  const ir::Shape& shape = *part->type.shape;
  const ir::Dim pixels = ir::numel(ir::Shape(shape.begin() + 1, shape.end() - 1));
  ir::Value* share = write.ratio(1, 1, pixels);  // before the sum, whichever compiler
  return by.scale(by.sum_inner(part), share);
}

// The moments of each image and channel, from distances to a number near the mean. The mean is
// exact then to its last digit, on which the gradient of a weight depends if it is large.
inline SplitMoments moments_of_images(Expander& write, ChannelWriter& by, const Channels& channels,
                                      ir::Value* x) {
  ir::Value* near = near_mean(write, by, channels, x);
  ir::Value* distance = write.make("Sub", {x, by.spread(near)});
  ir::Value* sum = by.sum_inner(distance);
  ir::Value* squares = by.sum_inner(write.make("Mul", {distance, distance}));
  return moments_around(write, near, sum, squares, channels.inner);
}

}  // namespace torch_ort::passes::composites
