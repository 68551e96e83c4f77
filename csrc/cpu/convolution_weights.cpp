// The gradient of the weight of a convolution as a product: that of the result, whose rows are the
// channels of the weight, times the pixels of the image under each tap of the windows.
//
// The right factor does not exist in memory. Its columns are the channels of the image, once for
// each tap, and its steps are the places of the result. Some columns at a time are packed for as
// many places as a block of a product has (cpu/product.h), straight from the image, with zeros for
// pixels outside. So the register kernel of products serves, and the sums of a number are in one
// order whatever the number of threads, which divide rows and columns.
//
// oneDNN has a kernel of its own for this gradient, which comes near the peak for small weights,
// with the registers of AVX-512 (benchmarks/results/decisions.md).
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/convolution.h"
#include "cpu/grid.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
// The sizes of blocks: places, which are the steps of the sums; columns, whose panels stay in the
// second-level cache while all rows are multiplied with them; rows that are packed at once; and
// rows that stay in the first-level cache. The last two are multiples of the tiles of all
// instruction sets.
constexpr int64_t kPlaces = 256, kColumns = 192, kRows = 480, kGroupRows = 48;
constexpr int64_t kBlock = 16;  // of channels that are copied at once

template <typename T>
class ConvolutionWeightGrad final : public Kernel {
 public:
  explicit ConvolutionWeightGrad(const BoundNode& bound)
      : kernels_(kernels<T>(isa_of(bound))),
        it_(bound),
        groups_(it_.read_groups(bound.node, bound.outputs.at(0))) {
    const Layout &gradient = bound.inputs[0], &weight = bound.outputs[0];
    channels_ = weight.sizes[1];
    rows_ = it_.rows / groups_;
    columns_ = it_.num_taps() * channels_;
    places_ = it_.batch * it_.result[0] * it_.result[1] * it_.result[2];
    ORT_CHECK(is_dense_by_pixels(gradient) && is_dense_by_pixels(weight),
              "ConvolutionWeightGrad: want a gradient and weights that are channels-last");
  }

  std::string str() const override {
    return concat("convolution weight gradient, ", it_.batch, " images of ", it_.channels, " x ",
                  it_.text(it_.image), ", ", it_.rows, " rows, ", it_.text(it_.window), " taps, ",
                  groups_, " groups\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    auto* weight = static_cast<T*>(outputs[0]);
    if (rows_ == 0 || columns_ == 0) return;
    if (places_ == 0) {
      std::fill_n(weight, groups_ * rows_ * columns_, T(0));
      return;
    }
    const auto* gradient = static_cast<const T*>(inputs[0]);
    const auto* image = static_cast<const T*>(inputs[1]);
    const int64_t work = places_ * rows_ * columns_ * groups_;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const Grid grid(rows_, columns_, ceil_div(wanted, groups_), rows_, kernels_.product_rows,
                    kernels_.panel_width);
    const int64_t parts = grid.num_parts(), all = parts * groups_;
    parallel_for(0, all, ceil_div(all, wanted), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t group = i / parts;
        multiply(gradient + group * rows_, image + group * channels_,
                 weight + group * rows_ * columns_, grid.part(i % parts));
      }
    });
  }

 private:
  // Whether pixels, and rows of a weight, follow each other without gaps.
  static bool is_dense_by_pixels(const Layout& layout) {
    int64_t stride = 1;
    bool is_dense = true;
    const auto visit = [&](size_t dim) {
      is_dense = is_dense && (layout.sizes[dim] == 1 || layout.strides[dim] == stride);
      stride *= layout.sizes[dim];
    };
    visit(1);
    for (size_t dim = layout.sizes.size() - 1; dim > 1; --dim) visit(dim);
    visit(0);
    return is_dense || stride == 0;  // there are no elements
  }

  // Computes one thread's part of the weight of a group.
  void multiply(const T* gradient, const T* image, T* weight, const Rectangle& part) const {
    const int64_t depth = even_part(places_, kPlaces, 1), tile = kernels_.product_rows;
    const int64_t height = even_part(part.rows, kRows, kGroupRows);
    // Panels that a single group of rows reads are multiplied while they are in the first-level
    // cache.
    const int64_t columns = part.rows > kGroupRows ? kColumns : kernels_.panel_width;
    const int64_t width = even_part(part.columns, columns, kernels_.panel_width);
    T* const left = thread_memory<T, Use::kLeft>(round_up(height, tile) * depth);
    T* const right = thread_memory<T, Use::kRight>(width * depth);
    for (int64_t i = 0; i < part.rows; i += height) {
      const int64_t rows = std::min(height, part.rows - i);
      for (int64_t place = 0; place < places_; place += depth) {
        const int64_t places = std::min(depth, places_ - place);
        kernels_.pack({.to = left,
                       .width = tile,
                       .steps = places,
                       .from = gradient + place * it_.rows + part.row + i,
                       .across = 1,
                       .along = it_.rows,
                       .count = rows});
        for (int64_t j = 0; j < part.columns; j += width) {
          const Rectangle block{part.row + i, rows, part.column + j,
                                std::min(width, part.columns - j)};
          pack_pixels(right, image, place, places, block.column, block.columns);
          multiply_block(left, right, weight, place > 0, places, block);
        }
      }
    }
  }

  // `adds`: to what is in `weight`.
  void multiply_block(const T* left, const T* right, T* weight, bool adds, int64_t places,
                      const Rectangle& block) const {
    const PackedColumns columns(block.columns, kernels_.panel_width);
    for (int64_t i = 0; i < block.rows; i += kGroupRows) {
      T* to = weight + (block.row + i) * columns_ + block.column;
      PanelProduct<T> product{};
      product.c = to;
      product.c_row = product.start_row = columns_;
      product.start = adds ? to : nullptr;
      product.a = left + i * places;
      product.a_is_packed = true;
      product.m = std::min(kGroupRows, block.rows - i);
      product.k = places;
      columns.multiply(kernels_, product, right);
    }
  }

  // Packs panels of the right factor, of some columns and places.
  void pack_pixels(T* to, const T* image, int64_t place, int64_t places, int64_t column,
                   int64_t columns) const {
    const PackedColumns packed(columns, kernels_.panel_width);
    for (int64_t j = 0; j < columns; j += kernels_.panel_width) {
      const int64_t count = std::min(kernels_.panel_width, columns - j);
      const int64_t width = packed.width_from(j);
      if (count < width) std::fill_n(to, width * places, T(0));
      // Channels of one tap after the other.
      for (int64_t first = 0; first < count;) {
        const int64_t at = column + j + first, channel = at % channels_;
        const int64_t next = std::min(count, first + channels_ - channel);
        pack_tap(to + first, width, image + channel, next - first, at / channels_, place, places);
        first = next;
      }
      to += width * places;
    }
  }

  // Packs `count` channels of the pixels under a tap, for some places.
  void pack_tap(T* to, int64_t width, const T* image, int64_t count, int64_t tap, int64_t place,
                int64_t places) const {
    const int64_t tap_row = tap / it_.window[2];
    const int64_t behind = tap_row / it_.window[1] * it_.dilation[0] - it_.pad[0];
    const int64_t down = tap_row % it_.window[1] * it_.dilation[1] - it_.pad[1];
    const int64_t right = tap % it_.window[2] * it_.dilation[2] - it_.pad[2];
    // The first places of a row of the result whose pixels are inside of the image, and not to its
    // left, and that are not to its right.
    const int64_t begin = ceil_div(std::max<int64_t>(-right, 0), it_.stride[2]);
    const int64_t end = ceil_div(std::max<int64_t>(it_.image[2] - right, 0), it_.stride[2]);
    while (places > 0) {
      const int64_t x = place % it_.result[2], row = place / it_.result[2];
      const int64_t y = row % it_.result[1], result_plane = row / it_.result[1];
      const int64_t z = result_plane % it_.result[0], n = result_plane / it_.result[0];
      const int64_t taken = std::min(places, it_.result[2] - x);
      const int64_t pixel_row = y * it_.stride[1] + down, plane = z * it_.stride[0] + behind;
      const bool is_inside =
          pixel_row >= 0 && pixel_row < it_.image[1] && plane >= 0 && plane < it_.image[0];
      const int64_t first = is_inside ? std::clamp(begin, x, x + taken) : x + taken;
      const int64_t last = is_inside ? std::clamp(end, first, x + taken) : first;
      fill_zeros(to, width, count, first - x);
      if (last > first) {
        const T* from = image + n * it_.image_strides[0] + plane * it_.image_strides[1] +
                        pixel_row * it_.image_strides[2] +
                        (first * it_.stride[2] + right) * it_.image_strides[3];
        copy_pixels(to + (first - x) * width, width, from, it_.stride[2] * it_.image_strides[3],
                    count, last - first);
      }
      fill_zeros(to + (last - x) * width, width, count, x + taken - last);
      to += taken * width;
      place += taken;
      places -= taken;
    }
  }

  static void fill_zeros(T* to, int64_t width, int64_t count, int64_t places) {
    for (int64_t p = 0; p < places; ++p, to += width) std::fill_n(to, count, T(0));
  }

  void copy_pixels(T* to, int64_t width, const T* from, int64_t step, int64_t count,
                   int64_t places) const {
    if (count == kernels_.panel_width) {
      return kernels_.pack({.to = to,
                            .width = width,
                            .steps = places,
                            .from = from,
                            .across = 1,
                            .along = step,
                            .count = count});
    }
    // Blocks of channels have a constant count, which is copied without a call.
    for (int64_t p = 0; p < places; ++p, from += step, to += width) {
      int64_t c = 0;
      for (; c + kBlock <= count; c += kBlock) std::copy_n(from + c, kBlock, to + c);
      for (; c < count; ++c) to[c] = from[c];
    }
  }

  const Kernels<T>& kernels_;
  const Convolution it_;
  const int64_t groups_;
  int64_t channels_ = 0, rows_ = 0;  // of a group
  int64_t columns_ = 0;              // channels of a group, for each tap
  int64_t places_ = 0;
};

}  // namespace

std::unique_ptr<const Kernel> make_convolution_weight_grad(const BoundNode& bound) {
  return make_of_dtype<ConvolutionWeightGrad>(bound);
}

}  // namespace torch_ort::cpu
