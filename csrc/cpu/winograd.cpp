// Convolutions with windows of 3x3 by Winograd's algorithm F(2x2, 3x3), which takes 16
// multiplications for four results of a channel where the sums of the definition take 36 (Lavin and
// Gray, "Fast algorithms for convolutional neural networks", 2016):
//
//   y = A^T (G w G^T * B^T x B) A      * multiplies number by number
//
// A tile is 2x2 pixels of the result, and the 4x4 pixels of the image that they depend on. With
// channels, each of the 16 places of a tile is a product of matrices of its own: tiles times
// channels, times the transformed weight. The gradient of the image is such a convolution, too, of
// the gradient of the result with the weight turned by half a turn. That of the weight is
//
//   dw = G^T (A dy A^T * B^T x B) G
//
// summed over tiles, which are the steps of the 16 products.
//
// Threads divide tiles or columns of the result, and go through their parts in blocks whose
// transforms stay in the second-level cache. So images are transformed once for each block of
// columns, which is little beside its products. All sums are in one order whatever the number of
// threads.
//
// A pixel that is not finite would reach all results of its tiles, where by the definition it
// reaches those whose windows it is in. So what is not finite is computed again by the definition.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/convolution.h"
#include "cpu/grid.h"
#include "cpu/panels.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kPlaces = 16;              // of a tile
constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
// The sizes of blocks: tiles, steps of the sums over channels, columns of the gradient of a weight,
// and its rows. They are multiples of the tiles and panels of all instruction sets.
constexpr int64_t kTiles = 48, kSteps = 256, kColumns = 64, kRows = 96;
// The columns of a result: as many as the weight of so many numbers has for a place.
constexpr int64_t kLeastColumns = 64, kMostColumns = 128, kWeight = 1 << 14;
// The tiles of the gradient of a weight are divided into parts if that has few numbers. Their sums
// take as many numbers as the second-level cache holds, and each has several blocks of tiles.
constexpr int64_t kMostParts = 16, kSums = 1 << 15, kPartTiles = 4 * kTiles;

// The pixels of images whose channels lie side by side. Those outside are all at one place.
template <typename T>
struct Pixels {
  explicit Pixels(const region::Layout& layout)
      : strides{layout.strides[0], layout.strides[2], layout.strides[3]},
        height(layout.sizes[2]),
        width(layout.sizes[3]) {}

  // The square of pixels from (y, x) on.
  template <int kSize, typename U>
  void find(U** pixels, U* image, U* outside, int64_t n, int64_t y, int64_t x) const {
    for (int64_t row = y; row < y + kSize; ++row) {
      for (int64_t column = x; column < x + kSize; ++column) {
        const bool is_inside = row >= 0 && row < height && column >= 0 && column < width;
        *pixels++ =
            is_inside ? image + n * strides[0] + row * strides[1] + column * strides[2] : outside;
      }
    }
  }

  std::array<int64_t, 3> strides;  // of images, rows and pixels
  int64_t height, width;
};

// The tiles of a result.
struct Tiles {
  Tiles(const region::Layout& result, const std::array<int64_t, 2>& pads)
      : batch(result.sizes[0]),
        down(ceil_div(result.sizes[2], 2)),
        right(ceil_div(result.sizes[3], 2)),
        pad(pads) {}

  int64_t count() const { return batch * down * right; }

  // Calls body(i, n, y, x) for `count` tiles from `first` on, with the first pixel of each in the
  // result.
  template <typename F>
  void for_each(int64_t first, int64_t count, const F& body) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t tile = first + i, row = tile / right;
      body(i, row / down, row % down * 2, tile % right * 2);
    }
  }

  int64_t batch, down, right;
  std::array<int64_t, 2> pad;
};

template <typename P, size_t kNumRows>
void point_into(std::array<P, kNumRows>& rows, P first, int64_t distance) {
  for (int64_t p = 0; p < kPlaces; ++p) rows[p] = first + p * distance;
}

// The transformed tiles of a block: for each place, rows of channels.
template <typename T>
struct Block {
  Block(T* memory, int64_t tiles, int64_t channels)
      : data(memory), row(spread_row<T>(channels)), place(tiles * row) {}
  static int64_t size(int64_t tiles, int64_t channels) {
    return kPlaces * tiles * spread_row<T>(channels);
  }
  T* at(int64_t p, int64_t tile) const { return data + p * place + tile * row; }
  // What begins with another row and number of each place.
  Block from(int64_t first_row, int64_t first) const {
    Block found = *this;
    found.data += first_row * row + first;
    return found;
  }

  T* data;
  int64_t row, place;
};

// ---- forward, and the gradient of the image

template <typename T>
class WinogradConvolution final : public Kernel {
 public:
  explicit WinogradConvolution(const BoundNode& bound)
      : kernels_(kernels<T>(isa_of(bound))),
        image_(bound.inputs.at(0)),
        result_(bound.outputs.at(0)),
        tiles_(bound.outputs.at(0), pads_of(bound)),
        is_turned_(ir::int_attr(bound.node.attrs, "turned", 0) != 0),
        has_bias_(bound.inputs.size() > 2) {
    const Layout &image = bound.inputs[0], &weight = bound.inputs.at(1), &result = bound.outputs[0];
    const size_t of_image = is_turned_ ? 0 : 1;  // dims of the weight
    channels_ = image.sizes.at(1);
    columns_ = result.sizes.at(1);
    std::vector<int64_t> want = {0, 0, 3, 3}, size = {image.sizes[0], columns_};
    want[of_image] = channels_;
    want[1 - of_image] = columns_;
    for (size_t dim = 0; dim < 2; ++dim) {
      size.push_back(image.sizes[2 + dim] + 2 * tiles_.pad[dim] - 2);
    }
    ORT_CHECK(weight.sizes == want && result.sizes == size && is_side_by_side(image) &&
                  is_side_by_side(result) && image.dtype == weight.dtype &&
                  image.dtype == result.dtype,
              "WinogradConvolution: the operands do not fit together");
    ORT_CHECK(!has_bias_ || (bound.inputs[2].sizes == std::vector<int64_t>{columns_} &&
                             bound.inputs[2].dtype == image.dtype && lies_by_rows(bound.inputs[2])),
              "WinogradConvolution: got a bias of another size than that of ", columns_,
              " channels");
    std::copy(weight.strides.begin(), weight.strides.end(), weight_strides_.begin());
    steps_ = even_part(channels_, kSteps, kernels_.panel_width);
  }

  std::string str() const override {
    return concat("Winograd convolution, ", tiles_.batch, " images of ", channels_, " x ",
                  image_.height, " x ", image_.width, " to ", columns_, " channels, ",
                  tiles_.count(), " tiles\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const int64_t tiles = tiles_.count();
    if (tiles == 0 || columns_ == 0) return;
    const Operands operands{static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]),
                            has_bias_ ? static_cast<const T*>(inputs[2]) : nullptr,
                            static_cast<T*>(outputs[0])};
    const int64_t work = kPlaces * tiles * std::max<int64_t>(channels_, 1) * columns_;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const Grid grid(tiles, columns_, wanted, tiles, kernels_.product_rows, kernels_.panel_width);
    parallel_for(0, grid.num_parts(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) Part(*this, operands).run(grid.part(i));
    });
  }

 private:
  struct Operands {
    const T *image, *weight, *bias;
    T* result;
  };

  // What one thread computes.
  class Part {
   public:
    Part(const WinogradConvolution& it, const Operands& operands) : it_(it), operands_(operands) {}

    void run(const Rectangle& part) {
      const int64_t channels = it_.channels_;
      const int64_t tiles = even_part(part.rows, kTiles, it_.kernels_.product_rows);
      const int64_t columns =
          std::clamp(kWeight / std::max<int64_t>(channels, 1), kLeastColumns, kMostColumns);
      const int64_t width = even_part(part.columns, columns, it_.kernels_.panel_width);
      weight_ = thread_memory<T, Use::kRight>(kPlaces * channels * width);
      spread_ = thread_memory<T, Use::kPanel>(kPlaces * it_.kernels_.panel_width *
                                              spread_row<T>(std::max(channels, width)));
      const int64_t longest = std::max(channels, width);
      taps_ = thread_memory<T, Use::kConverted>(9 * longest);
      zeros_ = thread_memory<T, Use::kImageRow>(2 * longest);
      std::fill_n(zeros_, longest, T(0));
      unread_ = zeros_ + longest;
      const Block<T> image(thread_memory<T, Use::kLeft>(Block<T>::size(tiles, channels)), tiles,
                           channels);
      const Block<T> result(thread_memory<T, Use::kSums>(Block<T>::size(tiles, width)), tiles,
                            width);
      for (int64_t j = 0; j < part.columns; j += width) {
        column_ = part.column + j;
        const int64_t taken = std::min(width, part.columns - j);
        const PackedColumns packed(taken, it_.kernels_.panel_width);
        transform_weight(packed, taken);
        for (int64_t i = 0; i < part.rows; i += tiles) {
          const int64_t first = part.row + i, count = std::min(tiles, part.rows - i);
          transform_images(image, first, count);
          for (int64_t p = 0; p < kPlaces; ++p) multiply(image, result, p, packed, count);
          transform_results(result, first, count, taken);
        }
      }
    }

   private:
    // The panels of a place and of the steps from `step` on.
    T* panels(const PackedColumns& packed, int64_t place, int64_t step) const {
      return weight_ + (place * it_.channels_ + step) * packed.padded();
    }

    void transform_weight(const PackedColumns& packed, int64_t columns) {
      it_.is_turned_ ? transform_by_steps(packed, columns) : transform_by_panels(packed, columns);
    }

    // Each row of the weight is a column of the products.
    void transform_by_panels(const PackedColumns& packed, int64_t columns) {
      const int64_t panel = it_.kernels_.panel_width, row = spread_row<T>(it_.channels_);
      for (int64_t j = 0; j < columns; j += panel) {
        const int64_t count = std::min(panel, columns - j);
        for (int64_t i = 0; i < count; ++i) {
          transform_taps(column_ + j + i, 0, it_.channels_, spread_ + i * row, panel * row);
        }
        for (int64_t p = 0; p < kPlaces; ++p) {
          for (int64_t step = 0; step < it_.channels_; step += it_.steps_) {
            const int64_t steps = std::min(it_.steps_, it_.channels_ - step);
            it_.kernels_.pack({.to = panels(packed, p, step) + j * steps,
                               .width = packed.width_from(j),
                               .steps = steps,
                               .from = spread_ + p * panel * row + step,
                               .across = row,
                               .along = 1,
                               .count = count});
          }
        }
      }
    }

    // Each row of the weight is a step of the products.
    void transform_by_steps(const PackedColumns& packed, int64_t columns) {
      const int64_t panel = it_.kernels_.panel_width, row = spread_row<T>(columns);
      for (int64_t first = 0; first < it_.channels_; first += panel) {
        const int64_t count = std::min(panel, it_.channels_ - first);
        for (int64_t i = 0; i < count; ++i) {
          transform_taps(first + i, column_, columns, spread_ + i * row, panel * row);
        }
        const int64_t step = first / it_.steps_ * it_.steps_;  // of the block that these are in
        const int64_t steps = std::min(it_.steps_, it_.channels_ - step);
        for (int64_t p = 0; p < kPlaces; ++p) {
          for (int64_t j = 0; j < columns; j += panel) {
            const int64_t width = packed.width_from(j);
            it_.kernels_.pack({.to = panels(packed, p, step) + j * steps + (first - step) * width,
                               .width = width,
                               .steps = count,
                               .from = spread_ + p * panel * row + j,
                               .across = 1,
                               .along = row,
                               .count = std::min(panel, columns - j)});
          }
        }
      }
    }

    // Transforms `n` windows of row `row` of the weight, from `column` on, to rows that are
    // `distance` apart.
    void transform_taps(int64_t row, int64_t column, int64_t n, T* to, int64_t distance) {
      std::array<const T*, 9> taps;
      const auto& strides = it_.weight_strides_;
      const T* const from = operands_.weight + row * strides[0] + column * strides[1];
      for (int64_t tap = 0; tap < 9; ++tap) {
        const T* const first = from + tap / 3 * strides[2] + tap % 3 * strides[3];
        T* const copy = taps_ + tap * n;
        if (strides[1] != 1) {
          for (int64_t i = 0; i < n; ++i) copy[i] = first[i * strides[1]];
        }
        taps[it_.is_turned_ ? 8 - tap : tap] = strides[1] == 1 ? first : copy;
      }
      std::array<T*, kPlaces> rows;
      point_into(rows, to, distance);
      it_.kernels_.tiles.weight(taps.data(), rows.data(), n);
    }

    void transform_images(const Block<T>& block, int64_t first, int64_t count) const {
      it_.tiles_.for_each(first, count, [&](int64_t i, int64_t n, int64_t y, int64_t x) {
        std::array<const T*, kPlaces> pixels;
        it_.image_.template find<4, const T>(pixels.data(), operands_.image, zeros_, n,
                                             y - it_.tiles_.pad[0], x - it_.tiles_.pad[1]);
        std::array<T*, kPlaces> rows;
        point_into(rows, block.at(0, i), block.place);
        it_.kernels_.tiles.image(pixels.data(), rows.data(), it_.channels_);
      });
    }

    void multiply(const Block<T>& image, const Block<T>& result, int64_t place,
                  const PackedColumns& packed, int64_t count) const {
      // Without channels the sums are of no steps.
      for (int64_t step = 0; step == 0 || step < it_.channels_; step += it_.steps_) {
        PanelProduct<T> product{};
        product.c = result.at(place, 0);
        product.c_row = product.start_row = result.row;
        product.start = step > 0 ? product.c : nullptr;
        product.a = image.at(place, 0) + step;
        product.a_row = image.row;
        product.a_column = 1;
        product.m = count;
        product.k = std::min(it_.steps_, it_.channels_ - step);
        packed.multiply(it_.kernels_, product, panels(packed, place, step));
      }
    }

    void transform_results(const Block<T>& block, int64_t first, int64_t count, int64_t columns) {
      it_.tiles_.for_each(first, count, [&](int64_t i, int64_t n, int64_t y, int64_t x) {
        std::array<const T*, kPlaces + 1> from;
        point_into<const T*>(from, block.at(0, i), block.place);
        from[kPlaces] = operands_.bias != nullptr ? operands_.bias + column_ : zeros_;
        std::array<T*, 4> pixels;
        it_.result_.template find<2, T>(pixels.data(), operands_.result + column_, unread_, n, y,
                                        x);
        if (it_.kernels_.tiles.result(from.data(), pixels.data(), columns) == T(0)) return;
        for (int64_t pixel = 0; pixel < 4; ++pixel) {
          if (pixels[pixel] == unread_) continue;
          compute(pixels[pixel], columns, n, y + pixel / 2, x + pixel % 2);
        }
      });
    }

    // Computes a pixel of the result by the definition.
    void compute(T* to, int64_t columns, int64_t n, int64_t y, int64_t x) const {
      const T* const start = operands_.bias != nullptr ? operands_.bias + column_ : zeros_;
      std::copy_n(start, columns, to);
      std::array<const T*, 9> pixels;
      it_.image_.template find<3, const T>(pixels.data(), operands_.image, zeros_, n,
                                           y - it_.tiles_.pad[0], x - it_.tiles_.pad[1]);
      const auto& strides = it_.weight_strides_;
      const int64_t along = strides[it_.is_turned_ ? 0 : 1];
      const int64_t across = strides[it_.is_turned_ ? 1 : 0];
      for (int64_t tap = 0; tap < 9; ++tap) {
        if (pixels[tap] == zeros_) continue;
        const int64_t from = it_.is_turned_ ? 8 - tap : tap;
        const T* const weight =
            operands_.weight + from / 3 * strides[2] + from % 3 * strides[3] + column_ * across;
        for (int64_t step = 0; step < it_.channels_; ++step) {
          const T pixel = pixels[tap][step];
          const T* const row = weight + step * along;
          for (int64_t j = 0; j < columns; ++j) to[j] += pixel * row[j * across];
        }
      }
    }

    const WinogradConvolution& it_;
    const Operands& operands_;
    int64_t column_ = 0;  // of the result: the first one of the block
    T *weight_ = nullptr, *spread_ = nullptr, *taps_ = nullptr;
    T *zeros_ = nullptr, *unread_ = nullptr;  // what is read outside of images, and written there
  };

  static std::array<int64_t, 2> pads_of(const BoundNode& bound) {
    const ir::Shape pads = ir::ints_attr(bound.node.attrs, "pads", {});
    const auto is_narrow = [](const ir::Dim& pad) {
      return pad.constant() >= 0 && pad.constant() <= 2;
    };
    ORT_CHECK(pads.size() == 2 && std::all_of(pads.begin(), pads.end(), is_narrow),
              "WinogradConvolution: pads: want two numbers from 0 to 2");
    return {pads[0].constant(), pads[1].constant()};
  }

  const Kernels<T>& kernels_;
  const Pixels<T> image_, result_;
  const Tiles tiles_;
  bool is_turned_, has_bias_;
  int64_t channels_ = 0, columns_ = 0, steps_ = 0;
  std::array<int64_t, 4> weight_strides_{};
};

// ---- the gradient of the weight

template <typename T>
class WinogradWeightGrad final : public Kernel {
 public:
  explicit WinogradWeightGrad(const BoundNode& bound)
      : kernels_(kernels<T>(isa_of(bound))),
        by_definition_(make_by_definition(bound)),
        it_(bound),
        gradient_(bound.inputs[0]),
        image_(bound.inputs[1]),
        tiles_(bound.inputs[0], it_.pad) {
    const std::array<int64_t, 2> three = {3, 3}, one = {1, 1};
    ORT_CHECK(it_.window == three && it_.stride == one && it_.dilation == one &&
                  bound.outputs[0].sizes[1] == it_.channels,
              "WinogradWeightGrad: want windows of 3x3, and neither strides, dilation nor groups");
    std::copy_n(bound.outputs[0].strides.begin(), 4, strides_.begin());
    const int64_t numbers = std::max<int64_t>(1, it_.rows * it_.channels);
    const int64_t most = std::min({kMostParts, kSums / numbers, tiles_.count() / kPartTiles});
    while (2 * parts_ <= most) parts_ *= 2;  // so that threads have equally many
  }

  std::string str() const override {
    return concat("Winograd weight gradient, ", it_.batch, " images of ", it_.channels, " x ",
                  it_.image[0], " x ", it_.image[1], ", ", it_.rows, " rows, ", tiles_.count(),
                  " tiles\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const int64_t tiles = tiles_.count();
    if (it_.rows == 0 || it_.channels == 0) return;
    if (tiles == 0) return run_by_definition(inputs, outputs);
    const Operands operands{static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]),
                            static_cast<T*>(outputs[0])};
    const int64_t work = kPlaces * tiles * it_.rows * it_.channels;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const Grid grid(it_.rows, it_.channels, ceil_div(wanted, parts_), it_.rows,
                    kernels_.product_rows, kernels_.panel_width);
    const int64_t size = Block<T>::size(it_.rows, it_.channels);
    T* const sums = parts_ == 1 ? nullptr : thread_memory<T, Use::kParts>(parts_ * size);
    const int64_t all = grid.num_parts() * parts_;
    std::atomic<bool> is_finite = true;
    parallel_for(0, all, ceil_div(all, wanted), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts_;
        T* const to = sums == nullptr ? nullptr : sums + part * size;
        if (!multiply(operands, grid.part(i / parts_), part, to)) is_finite = false;
      }
    });
    if (parts_ > 1) {
      parallel_for(0, it_.rows, ceil_div(it_.rows, wanted), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (!add_parts(sums, size, row, operands.weight)) is_finite = false;
        }
      });
    }
    if (!is_finite) run_by_definition(inputs, outputs);
  }

 private:
  // A kernel whose result is channels-last.
  static std::unique_ptr<const Kernel> make_by_definition(const BoundNode& bound) {
    std::vector<Layout> outputs = bound.outputs;
    Layout& weight = outputs.at(0);
    if (weight.sizes.size() == 4) {
      const int64_t channels = weight.sizes[1], row = channels * weight.sizes[3];
      weight.strides = {row * weight.sizes[2], 1, row, channels};
    }
    return make_convolution_weight_grad({bound.node, bound.inputs, outputs, bound.options});
  }

  void run_by_definition(const void* const* inputs, void* const* outputs) const {
    T* const found = thread_memory<T, Use::kConverted>(9 * it_.rows * it_.channels);
    void* const result = found;
    by_definition_->run(inputs, &result);
    for (int64_t row = 0; row < it_.rows; ++row) {
      put_row(static_cast<T*>(outputs[0]) + row * strides_[0], found + 9 * row * it_.channels,
              it_.channels);
    }
  }

  // Puts `n` channels of the gradient in their places, given side by side for each tap.
  void put_row(T* to, const T* taps, int64_t n) const {
    std::array<int64_t, 9> places;
    for (int64_t tap = 0; tap < 9; ++tap) {
      places[tap] = tap / 3 * strides_[2] + tap % 3 * strides_[3];
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t tap = 0; tap < 9; ++tap) to[i * strides_[1] + places[tap]] = taps[tap * n + i];
    }
  }

  struct Operands {
    const T *gradient, *image;
    T* weight;
  };

  // Computes a part of the gradient from a part of the tiles: its sums, if there is memory for
  // them, else what they amount to. Returns whether what it writes into the gradient is finite.
  bool multiply(const Operands& operands, const Rectangle& part, int64_t tile_part, T* to) const {
    const int64_t part_tiles = ceil_div(tiles_.count(), parts_);
    const int64_t begin = std::min(tile_part * part_tiles, tiles_.count());
    const int64_t end = std::min(begin + part_tiles, tiles_.count());
    const int64_t tiles = even_part(part_tiles, kTiles, 1);
    const int64_t height = even_part(part.rows, kRows, kernels_.product_rows);
    const int64_t width = even_part(part.columns, kColumns, kernels_.panel_width);
    const Block<T> left(thread_memory<T, Use::kLeft>(Block<T>::size(tiles, height)), tiles, height);
    const Block<T> right(thread_memory<T, Use::kRight>(Block<T>::size(tiles, width)), tiles, width);
    const Block<T> own(
        to == nullptr ? thread_memory<T, Use::kSums>(Block<T>::size(height, width)) : nullptr,
        height, width);
    const Block<T> all(to, it_.rows, it_.channels);
    T* const zeros = thread_memory<T, Use::kImageRow>(std::max(height, width));
    std::fill_n(zeros, std::max(height, width), T(0));
    bool is_finite = true;
    for (int64_t j = 0; j < part.columns; j += width) {
      for (int64_t i = 0; i < part.rows; i += height) {
        const Rectangle block{part.row + i, std::min(height, part.rows - i), part.column + j,
                              std::min(width, part.columns - j)};
        const Block<T> sums = to == nullptr ? own : all.from(block.row, block.column);
        for (int64_t first = begin; first < end; first += tiles) {
          const int64_t count = std::min(tiles, end - first);
          transform(left, operands.gradient + block.row, right, operands.image + block.column,
                    zeros, first, count, block);
          for (int64_t p = 0; p < kPlaces; ++p) {
            add(left, right, sums, p, first > begin, count, block);
          }
        }
        if (to == nullptr) is_finite = transform_sums(sums, operands.weight, block) && is_finite;
      }
    }
    return is_finite;
  }

  // Adds up the sums of all parts for a row of the gradient.
  bool add_parts(T* sums, int64_t size, int64_t row, T* weight) const {
    const Block<T> first(sums, it_.rows, it_.channels);
    for (int64_t part = 1; part < parts_; ++part) {
      for (int64_t p = 0; p < kPlaces; ++p) {
        T* const to = first.at(p, row);
        kernels_.add_rows(to, to + part * size, 1, it_.channels);
      }
    }
    return transform_sums(first.from(row, 0), weight, {row, 1, 0, it_.channels});
  }

  void transform(const Block<T>& left, const T* gradient, const Block<T>& right, const T* image,
                 const T* zeros, int64_t first, int64_t count, const Rectangle& block) const {
    tiles_.for_each(first, count, [&](int64_t i, int64_t n, int64_t y, int64_t x) {
      std::array<const T*, kPlaces> pixels;
      std::array<T*, kPlaces> rows;
      gradient_.template find<2, const T>(pixels.data(), gradient, zeros, n, y, x);
      point_into(rows, left.at(0, i), left.place);
      kernels_.tiles.gradient(pixels.data(), rows.data(), block.rows);
      image_.template find<4, const T>(pixels.data(), image, zeros, n, y - tiles_.pad[0],
                                       x - tiles_.pad[1]);
      point_into(rows, right.at(0, i), right.place);
      kernels_.tiles.image(pixels.data(), rows.data(), block.columns);
    });
  }

  void add(const Block<T>& left, const Block<T>& right, const Block<T>& sums, int64_t place,
           bool adds, int64_t count, const Rectangle& block) const {
    PanelProduct<T> product{};
    product.c = sums.at(place, 0);
    product.c_row = product.start_row = sums.row;
    product.start = adds ? product.c : nullptr;
    product.a = left.at(place, 0);
    product.a_row = 1;
    product.a_column = left.row;
    product.b = right.at(place, 0);
    product.b_row = right.row;
    product.b_panel = product.width = kernels_.panel_width;
    product.num_panels = ceil_div(block.columns, kernels_.panel_width);
    product.columns = block.columns;
    product.m = block.rows;
    product.k = count;
    kernels_.multiply(product);
  }

  bool transform_sums(const Block<T>& sums, T* weight, const Rectangle& block) const {
    T* const copy = thread_memory<T, Use::kConverted>(9 * block.columns);
    T zeros = 0;
    for (int64_t i = 0; i < block.rows; ++i) {
      std::array<const T*, kPlaces> from;
      point_into<const T*>(from, sums.at(0, i), sums.place);
      T* const to = weight + (block.row + i) * strides_[0] + block.column * strides_[1];
      std::array<T*, 9> taps;
      for (int64_t tap = 0; tap < 9; ++tap) {
        taps[tap] = strides_[1] == 1 ? to + tap / 3 * strides_[2] + tap % 3 * strides_[3]
                                     : copy + tap * block.columns;
      }
      zeros += kernels_.tiles.weight_gradient(from.data(), taps.data(), block.columns);
      if (strides_[1] != 1) put_row(to, copy, block.columns);
    }
    return zeros == T(0);
  }

  const Kernels<T>& kernels_;
  const std::unique_ptr<const Kernel> by_definition_;
  const Convolution it_;
  const Pixels<T> gradient_, image_;
  const Tiles tiles_;
  std::array<int64_t, 4> strides_{};  // of the result
  int64_t parts_ = 1;                 // of the tiles; depends on sizes alone
};

}  // namespace

std::unique_ptr<const Kernel> make_winograd_convolution(const BoundNode& bound) {
  for (const region::Layout* image : {&bound.inputs.at(0), &bound.outputs.at(0)}) {
    ORT_CHECK(image->sizes.size() == 4, "WinogradConvolution: want images of 4 dims");
  }
  return make_of_dtype<WinogradConvolution>(bound);
}

std::unique_ptr<const Kernel> make_winograd_weight_grad(const BoundNode& bound) {
  return make_of_dtype<WinogradWeightGrad>(bound);
}

}  // namespace torch_ort::cpu
