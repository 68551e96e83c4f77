// The gradient of the weight, and of the bias, of a convolution of each channel by itself.
//
// Channels lie side by side, and a thread has some of them. It copies each row of the image with
// zeros at both ends, so that no tap is outside, and adds what the row gives to all taps that read
// it, which stay in registers along the row. Sums are in one order for any number of threads: over
// the rows of an image, then over a part of the images, then over these parts.
#include "base/error.h"
#include "cpu/convolution.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 16;  // in multiplications
// So many parts are enough for the threads of any processor, and few enough to be added up.
constexpr int64_t kMostParts = 64;

template <typename T>
class DepthwiseWeightGrad final : public Kernel {
 public:
  explicit DepthwiseWeightGrad(const BoundNode& bound)
      : row_(kernels<T>(isa_of(bound)).depthwise_row), it_(bound) {
    const Layout& weight = bound.outputs[0];
    has_bias_ = bound.outputs.size() > 1;
    ORT_CHECK(
        !it_.is_volume && it_.rows == it_.channels && weight.sizes[1] == 1 && lies_by_rows(weight),
        "DepthwiseWeightGrad: the operands do not fit together");
    ORT_CHECK(!has_bias_ || (bound.outputs[1].sizes == std::vector<int64_t>{it_.channels} &&
                             bound.outputs[1].dtype == weight.dtype),
              "DepthwiseWeightGrad: got a bias of another size than that of ", it_.channels,
              " channels");
    blocks_ = (it_.channels + kDepthwiseChannels - 1) / kDepthwiseChannels;
    parts_ = std::max<int64_t>(1, std::min(it_.batch, kMostParts / std::max<int64_t>(1, blocks_)));
  }

  std::string str() const override {
    return concat("depthwise weight gradient, ", it_.batch, " images of ", it_.channels, " x ",
                  it_.image[1], " x ", it_.image[2], ", ", it_.window[1], " x ", it_.window[2],
                  " taps\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* gradient = static_cast<const T*>(inputs[0]);
    const auto* image = static_cast<const T*>(inputs[1]);
    // The sums of each part, for all channels: taps, then the bias.
    T* const all = thread_memory<T, Use::kSums>(parts_ * blocks_ * sums_of_block());
    const int64_t work =
        std::max<int64_t>(1, (it_.batch + parts_ - 1) / parts_ * it_.result[1] * it_.result[2] *
                                 it_.num_taps() * kDepthwiseChannels);
    parallel_for(0, parts_ * blocks_, std::max<int64_t>(1, kWorkPerThread / work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t at = begin; at < end; ++at) {
                     sum(gradient, image, at / parts_, at % parts_, all + at * sums_of_block());
                   }
                 });
    auto* weight = static_cast<T*>(outputs[0]);
    auto* bias = has_bias_ ? static_cast<T*>(outputs[1]) : nullptr;
    for (int64_t channel = 0; channel < it_.channels; ++channel) {
      const T* sums = all + channel / kDepthwiseChannels * parts_ * sums_of_block() +
                      channel % kDepthwiseChannels;
      for (int64_t tap = 0; tap <= it_.num_taps(); ++tap) {
        T total = 0;
        for (int64_t part = 0; part < parts_; ++part) {
          total += sums[part * sums_of_block() + tap * kDepthwiseChannels];
        }
        if (tap < it_.num_taps()) {
          weight[channel * it_.num_taps() + tap] = total;
        } else if (bias != nullptr) {
          bias[channel] = total;
        }
      }
    }
  }

 private:
  int64_t sums_of_block() const { return (it_.num_taps() + 1) * kDepthwiseChannels; }

  // Sums a part of the images, for a block of channels.
  void sum(const T* gradient, const T* image, int64_t block, int64_t part, T* totals) const {
    const int64_t first = block * kDepthwiseChannels;
    const int64_t count = std::min(kDepthwiseChannels, it_.channels - first);
    const int64_t width = it_.image[2] + 2 * it_.pad[2];
    T* const memory = thread_memory<T, Use::kImageRow>(
        (width + it_.result[2] + 1) * kDepthwiseChannels + sums_of_block());
    T *row = memory, *places = row + width * kDepthwiseChannels,
      *sums = places + (it_.result[2] + 1) * kDepthwiseChannels;
    std::fill_n(row, width * kDepthwiseChannels, T(0));
    std::fill_n(places, it_.result[2] * kDepthwiseChannels, T(0));
    T* const one = places + it_.result[2] * kDepthwiseChannels;
    std::fill_n(one, kDepthwiseChannels, T(1));
    std::fill_n(totals, sums_of_block(), T(0));
    for (int64_t n = it_.batch * part / parts_; n < it_.batch * (part + 1) / parts_; ++n) {
      std::fill_n(sums, sums_of_block(), T(0));
      const T* of_image = image + n * it_.image_strides[0] + first;
      const T* of_gradient = gradient + n * it_.gradient_strides[0] + first;
      for (int64_t y = 0; y < it_.image[1]; ++y) {
        copy_row(of_image + y * it_.image_strides[2], it_.image_strides[3], it_.image[2], count,
                 row + it_.pad[2] * kDepthwiseChannels);
        for (int64_t tap = 0; tap < it_.window[1]; ++tap) {
          const int64_t above = y + it_.pad[1] - tap * it_.dilation[1];
          if (above < 0 || above % it_.stride[1] != 0 || above / it_.stride[1] >= it_.result[1])
            continue;
          add(of_gradient + above / it_.stride[1] * it_.gradient_strides[2], count, places,
              {.sums = sums + tap * it_.window[2] * kDepthwiseChannels,
               .taps = it_.window[2],
               .image = row,
               .image_step = it_.stride[2] * kDepthwiseChannels,
               .tap_step = it_.dilation[2] * kDepthwiseChannels});
        }
      }
      for (int64_t y = 0; has_bias_ && y < it_.result[1]; ++y) {
        add(of_gradient + y * it_.gradient_strides[2], count, places,
            {.sums = sums + it_.num_taps() * kDepthwiseChannels, .taps = 1, .image = one});
      }
      for (int64_t i = 0; i < sums_of_block(); ++i) totals[i] += sums[i];
    }
  }

  // Adds a row of the gradient; the last channels of a block may not exist, and are zeros then.
  void add(const T* gradient, int64_t count, T* places, DepthwiseRow<T> row) const {
    row.gradient = gradient;
    row.gradient_step = it_.gradient_strides[3];
    row.places = it_.result[2];
    if (count < kDepthwiseChannels) {
      copy_row(gradient, it_.gradient_strides[3], it_.result[2], count, places);
      row.gradient = places;
      row.gradient_step = kDepthwiseChannels;
    }
    row_(row);
  }

  // Whole blocks have a constant count, which is copied without a call.
  static void copy_row(const T* from, int64_t step, int64_t places, int64_t count, T* to) {
    for (int64_t p = 0; p < places; ++p, from += step, to += kDepthwiseChannels) {
      if (count == kDepthwiseChannels) {
        std::copy_n(from, kDepthwiseChannels, to);
      } else {
        std::copy_n(from, count, to);
      }
    }
  }

  void (*row_)(const DepthwiseRow<T>& row);
  const Convolution it_;
  bool has_bias_ = false;
  int64_t blocks_ = 0, parts_ = 1;
};

}  // namespace

std::unique_ptr<const Kernel> make_depthwise_weight_grad(const BoundNode& bound) {
  return make_of_dtype<DepthwiseWeightGrad>(bound);
}

}  // namespace torch_ort::cpu
