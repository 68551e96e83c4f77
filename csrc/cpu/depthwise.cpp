// Convolutions of each channel by itself, their gradients towards the image, and those towards the
// weight and the bias.
//
// Channels lie side by side, and a thread has some of them. Results of a few neighbouring places
// are summed in registers, over all taps, of which those outside of the image are left out. For the
// gradient towards the image, places that are as far apart as the strides say are summed together,
// for the same taps reach all of them.
//
// Towards the weight, it adds what a row gives to all taps that read it, which stay in registers
// along the row. Sums are in one order for any number of threads: over the rows of an image, then
// over a part of the images, then over these parts.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/convolution.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 16;  // in multiplications
// Threads divide images, groups of blocks of channels, and parts of rows. Of each pixel as many
// cache lines are read at once as there are blocks in a group.
constexpr int64_t kUnitsOfThread = 4, kMostBlocks = 8, kLeastColumns = 32;
// So many parts are enough for the threads of any processor, and few enough to be added up.
constexpr int64_t kMostParts = 64;

struct Range {
  int64_t begin, end;
};

// What sums of numbers S are computed in.
template <typename S>
using Computed = std::conditional_t<std::is_same_v<S, double>, double, float>;

template <typename S>
const DepthwiseKernels<Computed<S>, S>& kernels_for(const BoundNode& bound) {
  const Kernels<Computed<S>>& all = kernels<Computed<S>>(isa_of(bound));
  if constexpr (std::is_same_v<S, c10::BFloat16>) {
    return all.depthwise_bfloat16;
  } else if constexpr (std::is_same_v<S, c10::Half>) {
    return all.depthwise_half;
  } else {
    return all.depthwise;
  }
}

// Makes K<S> for the dtype of the first result. Throws InternalError if that is no float.
template <template <typename> typename K>
std::unique_ptr<const Kernel> make_of_floats(const BoundNode& bound) {
  switch (bound.outputs.at(0).dtype) {
    case ir::DType::kBFloat16: return std::make_unique<const K<c10::BFloat16>>(bound);
    case ir::DType::kHalf: return std::make_unique<const K<c10::Half>>(bound);
    default: return make_of_dtype<K>(bound);
  }
}

// Copies some channels of a row, from place to place. Whole blocks have a constant count, which is
// copied without a call.
template <typename T, typename S>
void copy_places(const S* from, int64_t from_step, int64_t places, int64_t count, T* to,
                 int64_t to_step) {
  const auto copy = [&](int64_t channels) {
    for (int64_t c = 0; c < channels; ++c) to[c] = static_cast<T>(from[c]);
  };
  for (int64_t p = 0; p < places; ++p, from += from_step, to += to_step) {
    if (count == kDepthwiseChannels) {
      copy(kDepthwiseChannels);
    } else {
      copy(count);
    }
  }
}

template <typename S>
class DepthwiseConvolution final : public Kernel {
 public:
  explicit DepthwiseConvolution(const BoundNode& bound)
      : kernels_(kernels_for<S>(bound)),
        is_transposed_(ir::int_attr(bound.node.attrs, "transposed", 0) != 0),
        has_bias_(bound.inputs.size() > 2),
        it_(bound.node, is_transposed_ ? bound.inputs.at(0) : bound.outputs.at(0),
            is_transposed_ ? bound.outputs.at(0) : bound.inputs.at(0), bound.inputs.at(1)) {
    const Layout& weight = bound.inputs[1];
    ORT_CHECK(!it_.is_volume && it_.rows == it_.channels && weight.sizes[1] == 1,
              "DepthwiseConvolution: the operands do not fit together");
    weight_strides_ = {weight.strides[0], weight.strides[2], weight.strides[3]};
    if (has_bias_) {
      check_bias(bound.node, bound.inputs[2], weight.dtype, it_.channels, false);
      bias_step_ = bound.inputs[2].strides[0];
    }
    blocks_ = ceil_div(it_.channels, kDepthwiseChannels);
    const std::array<int64_t, 3>& to = is_transposed_ ? it_.image : it_.result;
    const std::array<int64_t, 3>& from = is_transposed_ ? it_.result : it_.image;
    to_ = {to[1], to[2], is_transposed_ ? it_.image_strides : it_.gradient_strides};
    from_ = {from[1], from[2], is_transposed_ ? it_.gradient_strides : it_.image_strides};
    rows_ = reaches_of(it_, 1, is_transposed_);
    for (Reach& reach : reaches_of(it_, 2, is_transposed_)) {
      phases_.push_back(phase_of(std::move(reach)));
    }
  }

  std::string str() const override {
    return concat("depthwise convolution, ", is_transposed_ ? "transposed, " : "", it_.batch,
                  " images of ", it_.channels, " x ", from_.rows, " x ", from_.columns, ", ",
                  it_.window[1], " x ", it_.window[2], " taps\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    if (it_.batch == 0 || blocks_ == 0 || to_.rows == 0 || to_.columns == 0) return;
    // The results do not depend on how they are divided.
    const int64_t wanted = ceil_div(kUnitsOfThread * num_threads(), it_.batch);
    const int64_t groups = std::clamp(wanted, ceil_div(blocks_, kMostBlocks), blocks_);
    const int64_t parts = std::clamp<int64_t>(wanted / groups, 1, to_.rows);
    // Images of one row are cut along it.
    const int64_t cuts =
        std::clamp<int64_t>(wanted / (groups * parts), 1, ceil_div(to_.columns, kLeastColumns));
    const int64_t units = it_.batch * groups * parts * cuts;
    const auto* image = static_cast<const S*>(inputs[0]);
    const T* const packed = pack(static_cast<const S*>(inputs[1]),
                                 has_bias_ ? static_cast<const S*>(inputs[2]) : nullptr);
    auto* result = static_cast<S*>(outputs[0]);
    const int64_t work =
        ceil_div(it_.batch * to_.rows * to_.columns * it_.num_taps() * it_.channels, units);
    parallel_for(
        0, units, std::max<int64_t>(1, kWorkPerThread / work), [&](int64_t begin, int64_t end) {
          for (int64_t at = begin; at < end; ++at) {
            const int64_t part = at / cuts % parts, group = at / cuts / parts % groups;
            convolve(image, packed, result, at / cuts / parts / groups,
                     {blocks_ * group / groups, blocks_ * (group + 1) / groups},
                     {to_.rows * part / parts, to_.rows * (part + 1) / parts}, {at % cuts, cuts});
          }
        });
  }

 private:
  using T = Computed<S>;
  using Tap = DepthwiseTap<T, S>;

  struct Side {
    int64_t rows, columns;
    std::array<int64_t, 4> strides;
  };

  // Columns of the result that the same columns of taps reach.
  struct Phase {
    Reach reach;
    Range inner = {0, 0};      // places of which no tap is outside
    bool has_windows = false;  // the columns that are read lie side by side
  };

  Phase phase_of(Reach reach) const {
    Phase phase{.reach = std::move(reach)};
    const auto& [first, apart, places, step, taps] = phase.reach;
    phase.inner = {0, places};
    for (const Reach::Tap& tap : taps) {
      const int64_t begin = ceil_div(std::max<int64_t>(-tap.begin, 0), step);
      const int64_t end = ceil_div(std::max<int64_t>(from_.columns - tap.begin, 0), step);
      phase.inner.begin = std::max(phase.inner.begin, begin);
      phase.inner.end = std::min(phase.inner.end, end);
    }
    if (phase.inner.begin >= phase.inner.end) phase.inner = {places, places};
    const int64_t num_taps = std::ssize(taps);
    phase.has_windows = has_depthwise_windows(num_taps, step) &&
                        taps.back().begin == taps.front().begin + num_taps - 1;
    return phase;
  }

  // Taps, then the bias.
  int64_t size_of_block() const { return (it_.num_taps() + 1) * kDepthwiseChannels; }

  // The taps of each block of channels, and zeros for channels that do not exist.
  const T* pack(const S* weight, const S* bias) const {
    T* const packed = thread_memory<T, Use::kWeight>(blocks_ * size_of_block());
    std::fill_n(packed, blocks_ * size_of_block(), T(0));
    for (int64_t channel = 0; channel < it_.channels; ++channel) {
      const S* from = weight + channel * weight_strides_[0];
      T* to =
          packed + channel / kDepthwiseChannels * size_of_block() + channel % kDepthwiseChannels;
      for (int64_t row = 0; row < it_.window[1]; ++row) {
        for (int64_t column = 0; column < it_.window[2]; ++column, to += kDepthwiseChannels) {
          *to = static_cast<T>(from[row * weight_strides_[1] + column * weight_strides_[2]]);
        }
      }
      if (bias != nullptr) *to = static_cast<T>(bias[channel * bias_step_]);
    }
    return packed;
  }

  // One of several parts of each row.
  struct Cut {
    int64_t index, count;
    Range places(const Phase& phase) const {
      const int64_t all = phase.reach.places;
      return {all * index / count, all * (index + 1) / count};
    }
  };

  // Computes rows of the result of one image, for some blocks of channels.
  void convolve(const S* image, const T* packed, S* result, int64_t n, Range blocks, Range to_rows,
                const Cut& cut) const {
    const int64_t first = blocks.begin * kDepthwiseChannels;
    const int64_t channels = std::min(blocks.end * kDepthwiseChannels, it_.channels) - first;
    packed += blocks.begin * size_of_block();
    image += n * from_.strides[0] + first;
    result += n * to_.strides[0] + first;
    std::vector<Tap> rows, taps;
    for (int64_t y = to_rows.begin; y < to_rows.end; ++y) {
      rows.clear();
      const Reach& reach = rows_[y % std::ssize(rows_)];
      for (const Reach::Tap& tap : reach.taps) {
        const int64_t row = y / reach.apart * reach.step + tap.begin;
        if (row < 0 || row >= from_.rows) continue;
        rows.push_back({image + row * from_.strides[2],
                        packed + tap.index * it_.window[2] * kDepthwiseChannels});
      }
      for (const Phase& phase : phases_) {
        S* const to = result + y * to_.strides[2] + phase.reach.first * to_.strides[3];
        if (phase.has_windows) {
          compute_windows(phase, cut.places(phase), rows, taps, packed, to, channels);
        } else {
          compute_places(phase, cut.places(phase), rows, taps, packed, to, channels);
        }
      }
    }
  }

  // Computes places of a row of a phase. `rows` begin where the image and the taps do, and `taps`
  // is memory.
  void compute_windows(const Phase& phase, Range places, const std::vector<Tap>& rows,
                       std::vector<Tap>& taps, const T* packed, S* to, int64_t channels) const {
    const Reach& reach = phase.reach;
    const std::vector<Reach::Tap>& columns = reach.taps;
    taps.clear();
    for (const Tap& row : rows) {
      taps.push_back({row.image, row.weights + columns[0].index * kDepthwiseChannels});
    }
    const int64_t between = columns.size() > 1 ? columns[1].index - columns[0].index : 0;
    kernels_.windows({.result = to + places.begin * reach.apart * to_.strides[3],
                      .result_step = reach.apart * to_.strides[3],
                      .places = places.end - places.begin,
                      .channels = channels,
                      .rows = taps.data(),
                      .num_rows = static_cast<int64_t>(taps.size()),
                      .taps = static_cast<int64_t>(columns.size()),
                      .stride = reach.step,
                      .origin = columns[0].begin + places.begin * reach.step,
                      .pixels = from_.columns,
                      .pixel_step = from_.strides[3],
                      .tap_step = between * kDepthwiseChannels,
                      .bias = packed + it_.num_taps() * kDepthwiseChannels,
                      .block_step = size_of_block()});
  }

  // The same for columns that are apart. Places of which taps are outside are summed one by one.
  void compute_places(const Phase& phase, Range places, const std::vector<Tap>& rows,
                      std::vector<Tap>& taps, const T* packed, S* to, int64_t channels) const {
    const Reach& reach = phase.reach;
    const auto compute = [&](int64_t begin, int64_t end) {
      taps.clear();
      for (const Tap& row : rows) {
        for (const Reach::Tap& column : reach.taps) {
          const int64_t at = begin * reach.step + column.begin;
          if (at < 0 || at >= from_.columns) continue;
          taps.push_back(
              {row.image + at * from_.strides[3], row.weights + column.index * kDepthwiseChannels});
        }
      }
      kernels_.result({.result = to + begin * reach.apart * to_.strides[3],
                       .result_step = reach.apart * to_.strides[3],
                       .places = end - begin,
                       .channels = channels,
                       .taps = taps.data(),
                       .num_taps = static_cast<int64_t>(taps.size()),
                       .place_step = reach.step * from_.strides[3],
                       .bias = packed + it_.num_taps() * kDepthwiseChannels,
                       .block_step = size_of_block()});
    };
    const int64_t begin = std::clamp(phase.inner.begin, places.begin, places.end);
    const int64_t end = std::clamp(phase.inner.end, begin, places.end);
    for (int64_t p = places.begin; p < begin; ++p) compute(p, p + 1);
    if (begin < end) compute(begin, end);
    for (int64_t p = end; p < places.end; ++p) compute(p, p + 1);
  }

  const DepthwiseKernels<T, S>& kernels_;
  const bool is_transposed_, has_bias_;
  const Convolution it_;
  Side from_, to_;
  std::array<int64_t, 3> weight_strides_{};  // of channels, rows and columns of taps
  int64_t bias_step_ = 0, blocks_ = 0;
  std::vector<Reach> rows_;
  std::vector<Phase> phases_;
};

template <typename S>
class DepthwiseWeightGrad final : public Kernel {
 public:
  explicit DepthwiseWeightGrad(const BoundNode& bound)
      : row_(kernels_for<S>(bound).row), it_(bound) {
    const Layout& weight = bound.outputs[0];
    has_bias_ = bound.outputs.size() > 1;
    ORT_CHECK(
        !it_.is_volume && it_.rows == it_.channels && weight.sizes[1] == 1 && lies_by_rows(weight),
        "DepthwiseWeightGrad: the operands do not fit together");
    if (has_bias_) check_bias(bound.node, bound.outputs[1], weight.dtype, it_.channels, false);
    blocks_ = ceil_div(it_.channels, kDepthwiseChannels);
    parts_ = std::max<int64_t>(1, std::min(it_.batch, kMostParts / std::max<int64_t>(1, blocks_)));
  }

  std::string str() const override {
    return concat("depthwise weight gradient, ", it_.batch, " images of ", it_.channels, " x ",
                  it_.image[1], " x ", it_.image[2], ", ", it_.window[1], " x ", it_.window[2],
                  " taps\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* gradient = static_cast<const S*>(inputs[0]);
    const auto* image = static_cast<const S*>(inputs[1]);
    // The sums of each part, for all channels: taps, then the bias.
    T* const all = thread_memory<T, Use::kSums>(parts_ * blocks_ * sums_of_block());
    // The sums do not depend on how blocks are divided.
    const int64_t groups = blocks_ == 0
                               ? 0
                               : std::clamp(ceil_div(kUnitsOfThread * num_threads(), parts_),
                                            ceil_div(blocks_, kMostBlocks), blocks_);
    const int64_t units = parts_ * groups;
    const int64_t work = it_.batch * it_.result[1] * it_.result[2] * it_.num_taps() * it_.channels /
                         std::max<int64_t>(units, 1);
    parallel_for(
        0, units, kWorkPerThread / std::max<int64_t>(work, 1) + 1, [&](int64_t begin, int64_t end) {
          for (int64_t at = begin; at < end; ++at) {
            const int64_t group = at / parts_;
            sum(gradient, image, {blocks_ * group / groups, blocks_ * (group + 1) / groups},
                at % parts_, all);
          }
        });
    auto* weight = static_cast<S*>(outputs[0]);
    auto* bias = has_bias_ ? static_cast<S*>(outputs[1]) : nullptr;
    for (int64_t channel = 0; channel < it_.channels; ++channel) {
      const T* sums = all + channel / kDepthwiseChannels * parts_ * sums_of_block() +
                      channel % kDepthwiseChannels;
      for (int64_t tap = 0; tap <= it_.num_taps(); ++tap) {
        T total = 0;
        for (int64_t part = 0; part < parts_; ++part) {
          total += sums[part * sums_of_block() + tap * kDepthwiseChannels];
        }
        if (tap < it_.num_taps()) {
          if (!std::isfinite(total)) total = sum_of_tap(gradient, image, channel, tap);
          weight[channel * it_.num_taps() + tap] = static_cast<S>(total);
        } else if (bias != nullptr) {
          bias[channel] = static_cast<S>(total);
        }
      }
    }
  }

 private:
  using T = Computed<S>;

  int64_t sums_of_block() const { return (it_.num_taps() + 1) * kDepthwiseChannels; }

  // Computes a tap by the definition. A gradient that is not finite makes it NaN otherwise, times a
  // zero beside the image.
  T sum_of_tap(const S* gradient, const S* image, int64_t channel, int64_t tap) const {
    const int64_t down = tap / it_.window[2] * it_.dilation[1] - it_.pad[1],
                  right = tap % it_.window[2] * it_.dilation[2] - it_.pad[2];
    T sum = 0;
    for (int64_t n = 0; n < it_.batch; ++n) {
      for (int64_t y = 0; y < it_.result[1]; ++y) {
        const int64_t row = y * it_.stride[1] + down;
        for (int64_t x = 0; row >= 0 && row < it_.image[1] && x < it_.result[2]; ++x) {
          const int64_t column = x * it_.stride[2] + right;
          if (column < 0 || column >= it_.image[2]) continue;
          sum += static_cast<T>(gradient[n * it_.gradient_strides[0] + y * it_.gradient_strides[2] +
                                         x * it_.gradient_strides[3] + channel]) *
                 static_cast<T>(image[n * it_.image_strides[0] + row * it_.image_strides[2] +
                                      column * it_.image_strides[3] + channel]);
        }
      }
    }
    return sum;
  }

  // Sums a part of the images, for some blocks of channels.
  void sum(const S* gradient, const S* image, Range blocks, int64_t part, T* all) const {
    const int64_t num_blocks = blocks.end - blocks.begin;
    const int64_t first = blocks.begin * kDepthwiseChannels;
    const int64_t count = std::min(blocks.end * kDepthwiseChannels, it_.channels) - first;
    const int64_t step = (num_blocks | 1) * kDepthwiseChannels;
    const int64_t width = it_.image[2] + 2 * it_.pad[2];
    T* const row = thread_memory<T, Use::kImageRow>(width * step + kDepthwiseChannels +
                                                    num_blocks * sums_of_block());
    T *const one = row + width * step, *const sums = one + kDepthwiseChannels;
    std::fill_n(row, width * step, T(0));
    std::fill_n(one, kDepthwiseChannels, T(1));
    const int64_t num_places = it_.result[2] * kDepthwiseChannels;
    S* const places = thread_memory<S, Use::kGradientRow>(num_places);
    std::fill_n(places, num_places, S(0));
    const auto totals = [&](int64_t block) {
      return all + ((blocks.begin + block) * parts_ + part) * sums_of_block();
    };
    for (int64_t block = 0; block < num_blocks; ++block) {
      std::fill_n(totals(block), sums_of_block(), T(0));
    }
    // Adds a row of the gradient to taps of all blocks.
    const auto add_blocks = [&](const S* of_gradient, int64_t tap, DepthwiseRow<T, S> from,
                                int64_t block_step) {
      for (int64_t block = 0; block < num_blocks; ++block, from.image += block_step) {
        const int64_t channel = block * kDepthwiseChannels;
        from.sums = sums + block * sums_of_block() + tap * kDepthwiseChannels;
        add(of_gradient + channel, std::min(kDepthwiseChannels, count - channel), places, from);
      }
    };
    for (int64_t n = it_.batch * part / parts_; n < it_.batch * (part + 1) / parts_; ++n) {
      std::fill_n(sums, num_blocks * sums_of_block(), T(0));
      const S* of_image = image + n * it_.image_strides[0] + first;
      const S* of_gradient = gradient + n * it_.gradient_strides[0] + first;
      for (int64_t y = 0; y < it_.image[1]; ++y) {
        copy_places(of_image + y * it_.image_strides[2], it_.image_strides[3], it_.image[2], count,
                    row + it_.pad[2] * step, step);
        for (int64_t tap = 0; tap < it_.window[1]; ++tap) {
          const int64_t above = y + it_.pad[1] - tap * it_.dilation[1];
          if (above < 0 || above % it_.stride[1] != 0 || above / it_.stride[1] >= it_.result[1])
            continue;
          add_blocks(of_gradient + above / it_.stride[1] * it_.gradient_strides[2],
                     tap * it_.window[2],
                     {.taps = it_.window[2],
                      .image = row,
                      .image_step = it_.stride[2] * step,
                      .tap_step = it_.dilation[2] * step},
                     kDepthwiseChannels);
        }
      }
      for (int64_t y = 0; has_bias_ && y < it_.result[1]; ++y) {
        add_blocks(of_gradient + y * it_.gradient_strides[2], it_.num_taps(),
                   {.taps = 1, .image = one}, 0);
      }
      for (int64_t block = 0; block < num_blocks; ++block) {
        T* const total = totals(block);
        const T* const of_block = sums + block * sums_of_block();
        for (int64_t i = 0; i < sums_of_block(); ++i) total[i] += of_block[i];
      }
    }
  }

  // Adds a row of the gradient; the last channels of a block may not exist, and are zeros then.
  void add(const S* gradient, int64_t count, S* places, DepthwiseRow<T, S> row) const {
    row.gradient = gradient;
    row.gradient_step = it_.gradient_strides[3];
    row.places = it_.result[2];
    if (count < kDepthwiseChannels) {
      copy_places(gradient, it_.gradient_strides[3], it_.result[2], count, places,
                  kDepthwiseChannels);
      row.gradient = places;
      row.gradient_step = kDepthwiseChannels;
    }
    row_(row);
  }

  void (*row_)(const DepthwiseRow<T, S>& row);
  const Convolution it_;
  bool has_bias_ = false;
  int64_t blocks_ = 0, parts_ = 1;
};

}  // namespace

std::unique_ptr<const Kernel> make_depthwise_convolution(const BoundNode& bound) {
  return make_of_floats<DepthwiseConvolution>(bound);
}

std::unique_ptr<const Kernel> make_depthwise_weight_grad(const BoundNode& bound) {
  return make_of_floats<DepthwiseWeightGrad>(bound);
}

}  // namespace torch_ort::cpu
