// The gradient of the weight, and of the bias, of a convolution of each channel by itself.
//
// Channels lie side by side, and a thread has some of them. It copies each row of the image with
// zeros at both ends, so that no tap is outside, and adds what the row gives to all taps that read
// it, which stay in registers along the row. Sums are in one order for any number of threads: over
// the rows of an image, then over a part of the images, then over these parts.
#include "base/error.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <array>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 16;  // in multiplications
// So many parts are enough for the threads of any processor, and few enough to be added up.
constexpr int64_t kMostParts = 64;
// Of a stride, a pad, a dilation or a window. With more, what a window reaches over has no number.
constexpr int64_t kMostOfDim = 1 << 20;

template <typename T>
class DepthwiseWeightGrad final : public Kernel {
 public:
  explicit DepthwiseWeightGrad(const BoundNode& bound)
      : row_(kernels<T>(isa_of(bound)).depthwise_row) {
    const Layout &gradient = bound.inputs.at(0), &image = bound.inputs.at(1);
    const Layout& weight = bound.outputs.at(0);
    has_bias_ = bound.outputs.size() > 1;
    const auto of_dims = [&](const char* name, int64_t least) {
      const ir::Shape numbers = ir::ints_attr(bound.node.attrs, name, {});
      ORT_CHECK(numbers.size() == 2, "DepthwiseWeightGrad: ", name, ": got ", numbers.size(),
                " numbers, want 2");
      for (const ir::Dim& number : numbers) {
        ORT_CHECK(number.constant() >= least && number.constant() <= kMostOfDim,
                  "DepthwiseWeightGrad: ", name, ": got ", number.constant(), ", want ", least,
                  " to ", kMostOfDim);
      }
      return std::array<int64_t, 2>{numbers[0].constant(), numbers[1].constant()};
    };
    stride_ = of_dims("strides", 1);
    pad_ = of_dims("pads", 0);
    dilation_ = of_dims("dilations", 1);
    ORT_CHECK(gradient.sizes.size() == 4 && image.sizes.size() == 4 && weight.sizes.size() == 4,
              "DepthwiseWeightGrad: want tensors of 4 dims");
    for (size_t dim = 0; dim < 2; ++dim) {
      ORT_CHECK(weight.sizes[2 + dim] <= kMostOfDim && pad_[dim] <= reach(weight, dim),
                "DepthwiseWeightGrad: pads: got ", pad_[dim], ", want at most the ",
                reach(weight, dim), " pixels that a window reaches over");
    }
    batch_ = image.sizes[0];
    channels_ = image.sizes[1];
    const std::vector<int64_t> want = {batch_, channels_, result_size(image, weight, 0),
                                       result_size(image, weight, 1)};
    const bool fits = gradient.sizes == want && weight.sizes[0] == channels_ &&
                      weight.sizes[1] == 1 && lies_by_rows(weight) &&
                      gradient.dtype == weight.dtype && image.dtype == weight.dtype;
    ORT_CHECK(fits && is_side_by_side(gradient) && is_side_by_side(image),
              "DepthwiseWeightGrad: the operands do not fit together");
    ORT_CHECK(!has_bias_ || (bound.outputs[1].sizes == std::vector<int64_t>{channels_} &&
                             bound.outputs[1].dtype == weight.dtype),
              "DepthwiseWeightGrad: got a bias of another size than that of ", channels_,
              " channels");
    image_ = {image.sizes[2], image.sizes[3]};
    result_ = {gradient.sizes[2], gradient.sizes[3]};
    window_ = {weight.sizes[2], weight.sizes[3]};
    gradient_strides_ = gradient.strides;
    image_strides_ = image.strides;
    blocks_ = (channels_ + kDepthwiseChannels - 1) / kDepthwiseChannels;
    parts_ = std::max<int64_t>(1, std::min(batch_, kMostParts / std::max<int64_t>(1, blocks_)));
  }

  std::string str() const override {
    return concat("depthwise weight gradient, ", batch_, " images of ", channels_, " x ", image_[0],
                  " x ", image_[1], ", ", window_[0], " x ", window_[1], " taps\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* gradient = static_cast<const T*>(inputs[0]);
    const auto* image = static_cast<const T*>(inputs[1]);
    // The sums of each part, for all channels: taps, then the bias.
    T* const all = thread_memory<T, Use::kSums>(parts_ * blocks_ * sums_of_block());
    const int64_t work = std::max<int64_t>(1, (batch_ + parts_ - 1) / parts_ * result_[0] *
                                                  result_[1] * num_taps() * kDepthwiseChannels);
    parallel_for(0, parts_ * blocks_, std::max<int64_t>(1, kWorkPerThread / work),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t at = begin; at < end; ++at) {
                     sum(gradient, image, at / parts_, at % parts_, all + at * sums_of_block());
                   }
                 });
    auto* weight = static_cast<T*>(outputs[0]);
    auto* bias = has_bias_ ? static_cast<T*>(outputs[1]) : nullptr;
    for (int64_t channel = 0; channel < channels_; ++channel) {
      const T* sums = all + channel / kDepthwiseChannels * parts_ * sums_of_block() +
                      channel % kDepthwiseChannels;
      for (int64_t tap = 0; tap <= num_taps(); ++tap) {
        T total = 0;
        for (int64_t part = 0; part < parts_; ++part) {
          total += sums[part * sums_of_block() + tap * kDepthwiseChannels];
        }
        if (tap < num_taps()) {
          weight[channel * num_taps() + tap] = total;
        } else if (bias != nullptr) {
          bias[channel] = total;
        }
      }
    }
  }

 private:
  static bool is_side_by_side(const Layout& layout) {
    return layout.sizes[1] <= 1 || layout.strides[1] == 1;
  }

  int64_t reach(const Layout& weight, size_t dim) const {
    return dilation_[dim] * (weight.sizes[2 + dim] - 1) + 1;
  }
  int64_t result_size(const Layout& image, const Layout& weight, size_t dim) const {
    return (image.sizes[2 + dim] + 2 * pad_[dim] - reach(weight, dim)) / stride_[dim] + 1;
  }

  int64_t num_taps() const { return window_[0] * window_[1]; }
  int64_t sums_of_block() const { return (num_taps() + 1) * kDepthwiseChannels; }

  // Sums a part of the images, for a block of channels.
  void sum(const T* gradient, const T* image, int64_t block, int64_t part, T* totals) const {
    const int64_t first = block * kDepthwiseChannels;
    const int64_t count = std::min(kDepthwiseChannels, channels_ - first);
    const int64_t width = image_[1] + 2 * pad_[1];
    T* const memory = thread_memory<T, Use::kImageRow>(
        (width + result_[1] + 1) * kDepthwiseChannels + sums_of_block());
    T *row = memory, *places = row + width * kDepthwiseChannels,
      *sums = places + (result_[1] + 1) * kDepthwiseChannels;
    std::fill_n(row, width * kDepthwiseChannels, T(0));
    std::fill_n(places, result_[1] * kDepthwiseChannels, T(0));
    T* const one = places + result_[1] * kDepthwiseChannels;
    std::fill_n(one, kDepthwiseChannels, T(1));
    std::fill_n(totals, sums_of_block(), T(0));
    for (int64_t n = batch_ * part / parts_; n < batch_ * (part + 1) / parts_; ++n) {
      std::fill_n(sums, sums_of_block(), T(0));
      const T* of_image = image + n * image_strides_[0] + first;
      const T* of_gradient = gradient + n * gradient_strides_[0] + first;
      for (int64_t y = 0; y < image_[0]; ++y) {
        copy_row(of_image + y * image_strides_[2], image_strides_[3], image_[1], count,
                 row + pad_[1] * kDepthwiseChannels);
        for (int64_t tap = 0; tap < window_[0]; ++tap) {
          const int64_t above = y + pad_[0] - tap * dilation_[0];
          if (above < 0 || above % stride_[0] != 0 || above / stride_[0] >= result_[0]) continue;
          add(of_gradient + above / stride_[0] * gradient_strides_[2], count, places,
              {.sums = sums + tap * window_[1] * kDepthwiseChannels,
               .taps = window_[1],
               .image = row,
               .image_step = stride_[1] * kDepthwiseChannels,
               .tap_step = dilation_[1] * kDepthwiseChannels});
        }
      }
      for (int64_t y = 0; has_bias_ && y < result_[0]; ++y) {
        add(of_gradient + y * gradient_strides_[2], count, places,
            {.sums = sums + num_taps() * kDepthwiseChannels, .taps = 1, .image = one});
      }
      for (int64_t i = 0; i < sums_of_block(); ++i) totals[i] += sums[i];
    }
  }

  // Adds a row of the gradient; the last channels of a block may not exist, and are zeros then.
  void add(const T* gradient, int64_t count, T* places, DepthwiseRow<T> row) const {
    row.gradient = gradient;
    row.gradient_step = gradient_strides_[3];
    row.places = result_[1];
    if (count < kDepthwiseChannels) {
      copy_row(gradient, gradient_strides_[3], result_[1], count, places);
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
  bool has_bias_ = false;
  int64_t batch_ = 0, channels_ = 0, blocks_ = 0, parts_ = 1;
  std::array<int64_t, 2> stride_{}, pad_{}, dilation_{}, image_{}, result_{}, window_{};
  std::vector<int64_t> gradient_strides_, image_strides_;
};

}  // namespace

std::unique_ptr<const Kernel> make_depthwise_weight_grad(const BoundNode& bound) {
  const ir::DType dtype = bound.outputs.at(0).dtype;
  if (dtype == ir::DType::kDouble)
    return std::make_unique<const DepthwiseWeightGrad<double>>(bound);
  ORT_CHECK(dtype == ir::DType::kFloat, "DepthwiseWeightGrad: got ", ir::name(dtype),
            ", want float32 or float64");
  return std::make_unique<const DepthwiseWeightGrad<float>>(bound);
}

}  // namespace torch_ort::cpu
