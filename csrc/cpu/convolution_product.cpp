// Convolutions by their definition, and transposed ones, which are the gradients of images, as
// products: the pixels under the taps of each place of the result times the weight.
//
// The left factor does not exist in memory: the register kernel reads each tap's pixels of its
// rows, the places, where they are, and zeros for pixels outside. Of the right factor as many steps
// and columns as stay in the second-level cache are packed. Of a transposed convolution with
// strides, places that the same taps reach are computed together, and no other taps are multiplied.
//
// Sums are in one order whatever the number of threads, which divide places and channels of the
// result.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/caches.h"
#include "cpu/convolution.h"
#include "cpu/grid.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <vector>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
// The packed numbers of a weight take this part of the second-level cache while places are
// multiplied with them, and have so many columns if there are as many. A panel of some of their
// steps stays in the first-level cache meanwhile.
constexpr int64_t kPartOfCache = 2, kLeastCache = 1 << 19, kColumns = 128, kSteps = 256;
// Blocks of channels of the image are multiples of so many.
constexpr int64_t kChannels = 16;
// Places whose sums stay in the caches over several blocks of steps, and those that are multiplied
// at once: a multiple of the tiles of all instruction sets.
constexpr int64_t kPlaces = 1920, kGroupPlaces = 48;

// A tap, and how far its pixels are from those that a place begins with.
struct Tap {
  int64_t index;
  std::array<int64_t, 3> begin;
};

// A part of a weight: taps, channels of the image, and channels of the result.
struct WeightBlock {
  int64_t tap, taps, channel, channels, column, columns;
  int64_t steps() const { return taps * channels; }
};

// Packs a weight as right factor: its columns are channels of the result, and its steps those of
// the image, for one tap after the other.
template <typename T>
class WeightPacker {
 public:
  // Strides of the channels of image and result, and of taps.
  WeightPacker(const Kernels<T>& kernels, int64_t of_image, int64_t of_result, int64_t of_tap,
               int64_t num_taps)
      : kernels_(kernels),
        of_image_(of_image),
        of_result_(of_result),
        of_tap_(of_tap),
        num_taps_(of_tap == 1 ? num_taps : 1) {}

  void pack(T* to, const T* weight, const std::vector<Tap>& taps, const WeightBlock& block) const {
    const PackedColumns packed(block.columns, kernels_.panel_width);
    weight += block.channel * of_image_ + block.column * of_result_;
    for (int64_t j = 0; j < block.columns; j += kernels_.panel_width) {
      Packing<T> panel{};
      panel.to = to + j * block.steps();
      panel.width = packed.width_from(j);
      panel.from = weight + j * of_result_;
      panel.across = of_result_;
      panel.count = std::min(kernels_.panel_width, block.columns - j);
      pack(panel, taps.data() + block.tap, block);
    }
  }

 private:
  void pack(const Packing<T>& panel, const Tap* taps, const WeightBlock& block) const {
    const int64_t width = panel.width;
    // Where taps lie side by side, all of them are packed, and those that are wanted copied, unless
    // they are few: of all channels of the image at once, if these follow each other.
    const bool has_most = num_taps_ > 1 && 2 * block.taps > num_taps_;
    if (has_most && of_image_ == num_taps_) {
      const T* const all = pack_side_by_side(panel, block.channels * num_taps_);
      for (int64_t i = 0; i < block.steps(); ++i) {
        const int64_t channel = i % block.channels, tap = taps[i / block.channels].index;
        std::copy_n(all + (channel * num_taps_ + tap) * width, width, panel.to + i * width);
      }
      return;
    }
    if (has_most) {
      for (int64_t channel = 0; channel < block.channels; ++channel) {
        Packing<T> of_channel = panel;
        of_channel.from += channel * of_image_;
        const T* const all = pack_side_by_side(of_channel, num_taps_);
        for (int64_t i = 0; i < block.taps; ++i) {
          std::copy_n(all + taps[i].index * width, width,
                      panel.to + (i * block.channels + channel) * width);
        }
      }
      return;
    }
    for (int64_t i = 0; i < block.taps; ++i) {
      Packing<T> of_tap = panel;
      of_tap.to += i * block.channels * width;
      of_tap.from += taps[i].index * of_tap_;
      of_tap.along = of_image_;
      of_tap.steps = block.channels;
      kernels_.pack(of_tap);
    }
  }

  const T* pack_side_by_side(Packing<T> panel, int64_t steps) const {
    panel.to = thread_memory<T, Use::kConverted>(panel.width * steps);
    panel.steps = steps;
    panel.along = 1;
    kernels_.pack(panel);
    return panel.to;
  }

  const Kernels<T>& kernels_;
  int64_t of_image_, of_result_, of_tap_;
  int64_t num_taps_;  // that lie side by side
};

template <typename T>
class ConvolutionProduct final : public Kernel {
 public:
  explicit ConvolutionProduct(const BoundNode& bound)
      : kernels_(kernels<T>(isa_of(bound))),
        is_transposed_(ir::int_attr(bound.node.attrs, "transposed", 0) != 0),
        has_bias_(bound.inputs.size() > 2),
        it_(bound.node, is_transposed_ ? bound.inputs.at(0) : bound.outputs.at(0),
            is_transposed_ ? bound.outputs.at(0) : bound.inputs.at(0), bound.inputs.at(1)),
        groups_(it_.read_groups(bound.node, bound.inputs.at(1))) {
    const Layout& weight = bound.inputs[1];
    const std::array<int64_t, 4> strides = pixel_strides(weight);
    row_stride_ = strides[0];
    channel_stride_ = weight.strides[1];
    tap_stride_ = strides[3];
    ORT_CHECK(has_one_stride(strides), "Convolution: want a weight whose taps are evenly apart");
    from_ = is_transposed_ ? Side{it_.result, it_.gradient_strides, it_.rows / groups_}
                           : Side{it_.image, it_.image_strides, weight.sizes[1]};
    to_ = is_transposed_ ? Side{it_.image, it_.image_strides, weight.sizes[1]}
                         : Side{it_.result, it_.gradient_strides, it_.rows / groups_};
    if (has_bias_) {
      check_bias(bound.node, bound.inputs[2], weight.dtype, to_.channels * groups_, true);
    }
    most_of_block_ = std::max(caches().second_level, kLeastCache) / kPartOfCache /
                     static_cast<int64_t>(sizeof(T));
    std::array<std::vector<Reach>, 3> dims;
    for (size_t dim = 0; dim < 3; ++dim) dims[dim] = reaches_of(it_, dim, is_transposed_);
    for (const Reach& plane : dims[0]) {
      for (const Reach& row : dims[1]) {
        for (const Reach& column : dims[2]) phases_.push_back(phase_of({plane, row, column}));
      }
    }
  }

  std::string str() const override {
    return concat("convolution, ", is_transposed_ ? "transposed, " : "", it_.batch, " images of ",
                  from_.channels * groups_, " x ", it_.text(from_.pixels), ", ",
                  to_.channels * groups_, " channels, ", it_.text(it_.window), " taps, ", groups_,
                  " groups\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    int64_t most = 0, work = 0;
    for (const Phase& phase : phases_) {
      most = std::max(most, phase.places);
      work += phase.places * std::ssize(phase.taps) * from_.channels * to_.channels * groups_;
    }
    if (most == 0 || to_.channels == 0) return;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const Grid grid(most, to_.channels, ceil_div(wanted, groups_), most, kernels_.product_rows,
                    kernels_.panel_width);
    const int64_t parts = grid.num_parts(), all = parts * groups_;
    const int64_t of_weight = is_transposed_ ? from_.channels : to_.channels;  // rows of a group
    parallel_for(0, all, ceil_div(all, wanted), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t group = i / parts;
        const Operands operands{
            static_cast<const T*>(inputs[0]) + group * from_.channels,
            static_cast<const T*>(inputs[1]) + group * of_weight * row_stride_,
            has_bias_ ? static_cast<const T*>(inputs[2]) + group * to_.channels : nullptr,
            static_cast<T*>(outputs[0]) + group * to_.channels};
        const Rectangle part = grid.part(i % parts);
        for (const Phase& phase : phases_) {
          const int64_t first = part.row * phase.places / most;
          const int64_t last = (part.row + part.rows) * phase.places / most;
          Part(*this, phase, operands).run({first, last - first, part.column, part.columns});
        }
      }
    });
  }

 private:
  struct Side {
    std::array<int64_t, 3> pixels;
    std::array<int64_t, 4> strides;  // of images, planes, rows and columns
    int64_t channels;                // of a group
  };
  struct Operands {
    const T *image, *weight, *bias;
    T* result;
  };
  // Places that the same taps reach, of all images.
  struct Phase {
    std::array<Reach, 3> dims;
    std::vector<Tap> taps;
    int64_t places = 0;
    // Of a block of the weight, and how many of its taps are multiplied at once. They depend on
    // sizes alone, since sums are formed block by block.
    int64_t block_channels = 0, block_taps = 0, taps_at_once = 0;
  };
  // Places side by side: the plane, row and column that the first one's taps would read without
  // pads.
  struct Run {
    const T* image;
    std::array<int64_t, 3> at;
    int64_t count;
  };

  bool has_one_stride(const std::array<int64_t, 4>& strides) const {
    int64_t want = tap_stride_;
    for (size_t dim = 3; dim-- > 0;) {
      if (it_.window[dim] > 1 && strides[dim + 1] != want) return false;
      want *= it_.window[dim];
    }
    return true;
  }

  Phase phase_of(std::array<Reach, 3> dims) const {
    Phase phase{.dims = std::move(dims)};
    const auto& [planes, rows, columns] = phase.dims;
    phase.places = it_.batch * planes.places * rows.places * columns.places;
    for (const Reach::Tap& plane : planes.taps) {
      for (const Reach::Tap& row : rows.taps) {
        for (const Reach::Tap& column : columns.taps) {
          const int64_t index =
              (plane.index * it_.window[1] + row.index) * it_.window[2] + column.index;
          phase.taps.push_back({index, {plane.begin, row.begin, column.begin}});
        }
      }
    }
    divide(phase);
    return phase;
  }

  // Chooses the blocks of its steps.
  void divide(Phase& phase) const {
    if (phase.taps.empty() || from_.channels == 0) return;
    const int64_t columns = std::min(round_up(to_.channels, kernels_.panel_width), kColumns);
    const int64_t steps = most_of_block_ / std::max(columns, kernels_.panel_width);
    const auto taps = static_cast<int64_t>(phase.taps.size());
    const int64_t channels = std::max(kChannels, steps / taps / kChannels * kChannels);
    phase.block_channels = std::min(from_.channels, even_part(from_.channels, channels, kChannels));
    const auto even_taps = [&](int64_t all, int64_t most_steps) {
      return even_part(all, std::max<int64_t>(1, most_steps / phase.block_channels), 1);
    };
    phase.block_taps = even_taps(taps, steps);
    phase.taps_at_once = even_taps(phase.block_taps, kSteps);
  }

  // What one thread computes of a phase.
  class Part {
   public:
    Part(const ConvolutionProduct& it, const Phase& phase, const Operands& operands)
        : it_(it),
          phase_(phase),
          operands_(operands),
          packer_(it.kernels_, it.is_transposed_ ? it.row_stride_ : it.channel_stride_,
                  it.is_transposed_ ? it.channel_stride_ : it.row_stride_, it.tap_stride_,
                  it.it_.num_taps()) {}

    void run(const Rectangle& part) {
      if (part.rows <= 0 || part.columns <= 0) return;
      if (phase_.taps.empty() || it_.from_.channels == 0) return fill(part);
      const int64_t steps = phase_.block_channels * phase_.block_taps;
      const int64_t panel = it_.kernels_.panel_width;
      const int64_t most = std::max(panel, it_.most_of_block_ / steps / panel * panel);
      const int64_t width = even_part(part.columns, most, panel);
      const int64_t height = even_part(part.rows, kPlaces, kGroupPlaces);
      weight_ = thread_memory<T, Use::kRight>(width * steps);
      zeros_ = thread_memory<T, Use::kImageRow>(phase_.block_channels);
      std::fill_n(zeros_, phase_.block_channels, T(0));
      pixels_.resize(phase_.taps_at_once * kGroupPlaces);
      for (int64_t j = 0; j < part.columns; j += width) {
        for (int64_t i = 0; i < part.rows; i += height) {
          multiply_block({part.row + i, std::min(height, part.rows - i), part.column + j,
                          std::min(width, part.columns - j)});
        }
      }
    }

   private:
    // What no tap reaches.
    void fill(const Rectangle& part) const {
      for (int64_t i = 0; i < part.rows; ++i) {
        T* to = result_of(find(part.row + i)) + part.column;
        if (operands_.bias == nullptr) {
          std::fill_n(to, part.columns, T(0));
        } else {
          std::copy_n(operands_.bias + part.column, part.columns, to);
        }
      }
    }

    // The image, plane, row and column of a place.
    std::array<int64_t, 4> find(int64_t place) const {
      const auto& [planes, rows, columns] = phase_.dims;
      const int64_t row = place / columns.places, plane = row / rows.places;
      return {plane / planes.places, plane % planes.places, row % rows.places,
              place % columns.places};
    }

    T* result_of(const std::array<int64_t, 4>& at) const {
      int64_t offset = at[0] * it_.to_.strides[0];
      for (size_t dim = 0; dim < 3; ++dim) {
        const Reach& reach = phase_.dims[dim];
        offset += (reach.first + at[dim + 1] * reach.apart) * it_.to_.strides[dim + 1];
      }
      return operands_.result + offset;
    }

    void multiply_block(const Rectangle& part) {
      const auto num_taps = static_cast<int64_t>(phase_.taps.size());
      for (int64_t c = 0; c < it_.from_.channels; c += phase_.block_channels) {
        const int64_t channels = std::min(phase_.block_channels, it_.from_.channels - c);
        for (int64_t tap = 0; tap < num_taps; tap += phase_.block_taps) {
          const WeightBlock block{tap,         std::min(phase_.block_taps, num_taps - tap),
                                  c,           channels,
                                  part.column, part.columns};
          packer_.pack(weight_, operands_.weight, phase_.taps, block);
          for (int64_t i = 0; i < part.rows; i += kGroupPlaces) {
            find_places(part.row + i, std::min(kGroupPlaces, part.rows - i));
            multiply_group(block);
          }
        }
      }
    }

    // Finds the places of a group, and where their results are.
    void find_places(int64_t first, int64_t count) {
      const auto& [planes, rows, columns] = phase_.dims;
      runs_.clear();
      num_places_ = count;
      T** results = results_.data();
      for (int64_t left = count; left > 0;) {
        const std::array<int64_t, 4> at = find(first);
        const auto& [n, z, y, x] = at;
        const int64_t taken = std::min(left, columns.places - x);
        runs_.push_back({operands_.image + n * it_.from_.strides[0],
                         {z * planes.step, y * rows.step, x * columns.step},
                         taken});
        T* const result = result_of(at);
        for (int64_t i = 0; i < taken; ++i) {
          *results++ = result + i * columns.apart * it_.to_.strides[3];
        }
        first += taken;
        left -= taken;
      }
    }

    void multiply_group(const WeightBlock& block) {
      const PackedColumns columns(block.columns, it_.kernels_.panel_width);
      for (int64_t first = 0; first < block.taps; first += phase_.taps_at_once) {
        const int64_t count = std::min(phase_.taps_at_once, block.taps - first);
        for (int64_t i = 0; i < count; ++i) {
          const T** to = pixels_.data() + i * kGroupPlaces;
          for (const Run& run : runs_) {
            find_pixels(run, phase_.taps[block.tap + first + i], block.channel, to);
            to += run.count;
          }
        }
        columns.multiply(it_.kernels_,
                         ScatteredProduct<T>{.c = results_.data(),
                                             .adds = block.channel > 0 || block.tap + first > 0,
                                             .start = operands_.bias,
                                             .a = pixels_.data(),
                                             .a_segment = kGroupPlaces,
                                             .num_segments = count,
                                             .steps = block.channels,
                                             .m = num_places_,
                                             .column = block.column},
                         weight_, first * block.channels, block.steps());
      }
    }

    // Finds the pixels that a tap reads for places side by side, from a channel on.
    void find_pixels(const Run& run, const Tap& tap, int64_t channel, const T** to) const {
      const Side& from = it_.from_;
      const int64_t z = run.at[0] + tap.begin[0], y = run.at[1] + tap.begin[1],
                    x = run.at[2] + tap.begin[2], step = phase_.dims[2].step;
      const bool is_inside = z >= 0 && z < from.pixels[0] && y >= 0 && y < from.pixels[1];
      // The places whose pixels are inside.
      const int64_t begin = std::min(ceil_div(std::max<int64_t>(-x, 0), step), run.count);
      const int64_t reach = ceil_div(std::max<int64_t>(from.pixels[2] - x, 0), step);
      const int64_t end = is_inside ? std::clamp(reach, begin, run.count) : begin;
      std::fill(to, to + begin, zeros_);
      std::fill(to + end, to + run.count, zeros_);
      if (begin == end) return;
      const T* const row = run.image + z * from.strides[1] + y * from.strides[2] + channel;
      for (int64_t i = begin; i < end; ++i) to[i] = row + (x + i * step) * from.strides[3];
    }

    const ConvolutionProduct& it_;
    const Phase& phase_;
    const Operands operands_;
    const WeightPacker<T> packer_;
    T *weight_ = nullptr, *zeros_ = nullptr;  // packed; as many as channels of a block
    // Of a group of places.
    int64_t num_places_ = 0;
    std::vector<Run> runs_;
    std::array<T*, kGroupPlaces> results_;
    std::vector<const T*> pixels_;  // by tap
  };

  const Kernels<T>& kernels_;
  const bool is_transposed_, has_bias_;
  const Convolution it_;
  const int64_t groups_;
  int64_t row_stride_ = 0, channel_stride_ = 0, tap_stride_ = 0;  // of the weight
  Side from_, to_;
  int64_t most_of_block_ = 0;  // numbers of the weight
  std::vector<Phase> phases_;
};

}  // namespace

std::unique_ptr<const Kernel> make_convolution(const BoundNode& bound) {
  return make_of_dtype<ConvolutionProduct>(bound);
}

}  // namespace torch_ort::cpu
