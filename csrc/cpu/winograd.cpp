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
// Volumes are images one behind the other: their windows of 3x3x3 have three depths, each with a
// transformed weight of its own, whose products with the planes of a volume are added up before the
// result is transformed back. A block has tiles of several planes, plane by plane, so that one that
// is shifted by a plane is a part of the same memory.
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
#include "cpu/winograd_tiles.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kPlaces = 16;              // of a tile
constexpr int64_t kWorkPerThread = 1 << 17;  // multiplications
// The sizes of blocks: steps of the sums over channels, columns of the gradient of a weight, and
// its rows. They are multiples of the tiles and panels of all instruction sets.
constexpr int64_t kSteps = 256, kColumns = 64, kRows = 96;
// The columns of a result: as many as the weight of so many numbers has for a place.
constexpr int64_t kLeastColumns = 64, kMostColumns = 128, kWeight = 1 << 14;
// The tiles of the gradient of a weight are divided into parts if that has few numbers. Their sums
// take as many numbers as the second-level cache holds, and each has several blocks of tiles.
constexpr int64_t kMostParts = 16, kSums = 1 << 15, kPartTiles = 4 * Tiles::kMostTiles;

// The pads that a node says, of a window of three on each side.
std::vector<int64_t> pads_of(const BoundNode& bound) {
  const ir::Shape pads = ir::ints_attr(bound.node.attrs, "pads", {});
  const size_t want = bound.inputs.at(0).sizes.size() - 2;
  const auto is_narrow = [](const ir::Dim& pad) {
    return pad.constant() >= 0 && pad.constant() <= 2;
  };
  ORT_CHECK(pads.size() == want && std::all_of(pads.begin(), pads.end(), is_narrow),
            bound.node.op.name, ": pads: want ", want, " numbers from 0 to 2");
  std::vector<int64_t> found;
  for (const ir::Dim& pad : pads) found.push_back(pad.constant());
  return found;
}

// The sizes of a result of `channels` channels.
std::vector<int64_t> result_sizes(const region::Layout& image, int64_t channels,
                                  const std::vector<int64_t>& pads) {
  std::vector<int64_t> sizes = {image.sizes[0], channels};
  for (size_t dim = 0; dim < pads.size(); ++dim) {
    sizes.push_back(image.sizes[2 + dim] + 2 * pads[dim] - 2);
  }
  return sizes;
}

// The strides of a weight: of rows, channels and the depths, rows and columns of a window.
std::array<int64_t, 5> strides_of(const region::Layout& weight) {
  const auto [row, depth, down, right] = pixel_strides(weight);
  return {row, weight.strides[1], depth, down, right};
}

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
    std::vector<int64_t> want(image.sizes.size(), 3);
    want[of_image] = channels_;
    want[1 - of_image] = columns_;
    const std::vector<int64_t> size = result_sizes(image, columns_, pads_of(bound));
    ORT_CHECK(weight.sizes == want && result.sizes == size && is_side_by_side(image) &&
                  is_side_by_side(result) && image.dtype == weight.dtype &&
                  image.dtype == result.dtype,
              "WinogradConvolution: the operands do not fit together");
    if (has_bias_) check_bias(bound.node, bound.inputs[2], image.dtype, columns_, true);
    weight_strides_ = strides_of(weight);
    steps_ = even_part(channels_, kSteps, kernels_.panel_width);
  }

  std::string str() const override {
    return concat("Winograd convolution, ", tiles_.batch, " images of ", channels_, " x ",
                  tiles_.is_volume ? concat(image_.depth, " x ") : "", image_.height, " x ",
                  image_.width, " to ", columns_, " channels, ", tiles_.count(), " tiles\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const int64_t tiles = tiles_.count();
    if (tiles == 0 || columns_ == 0) return;
    const Operands operands{static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]),
                            has_bias_ ? static_cast<const T*>(inputs[2]) : nullptr,
                            static_cast<T*>(outputs[0])};
    const int64_t work = kPlaces * tiles_.taps * tiles * std::max<int64_t>(channels_, 1) * columns_;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const int64_t units = tiles_.num_units();
    const Grid grid(units, columns_, wanted, units, tiles_.is_volume ? 1 : kernels_.product_rows,
                    kernels_.panel_width);
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
      const int64_t channels = it_.channels_, steps = it_.tiles_.taps * channels;
      const int64_t units = it_.tiles_.units_in_block(part.rows, it_.kernels_.product_rows);
      const int64_t tiles = it_.tiles_.most_tiles(units);
      const int64_t of_image = it_.tiles_.most_of_image(units);
      const int64_t columns =
          std::clamp(kWeight / std::max<int64_t>(steps, 1), kLeastColumns, kMostColumns);
      const int64_t width = even_part(part.columns, columns, it_.kernels_.panel_width);
      weight_ = thread_memory<T, Use::kRight>(kPlaces * steps * width);
      spread_ = thread_memory<T, Use::kPanel>(kPlaces * it_.kernels_.panel_width *
                                              spread_row<T>(std::max(channels, width)));
      const int64_t longest = std::max(channels, width);
      taps_ = thread_memory<T, Use::kConverted>(9 * longest);
      zeros_ = thread_memory<T, Use::kImageRow>(2 * longest);
      std::fill_n(zeros_, longest, T(0));
      unread_ = zeros_ + longest;
      const Block<T> image(thread_memory<T, Use::kLeft>(Block<T>::size(of_image, channels)),
                           of_image, channels);
      const Block<T> result(thread_memory<T, Use::kSums>(Block<T>::size(tiles, width)), tiles,
                            width);
      for (int64_t j = 0; j < part.columns; j += width) {
        column_ = part.column + j;
        const int64_t taken = std::min(width, part.columns - j);
        const PackedColumns packed(taken, it_.kernels_.panel_width);
        for (int64_t tap = 0; tap < it_.tiles_.taps; ++tap) transform_weight(packed, tap, taken);
        for (int64_t i = 0; i < part.rows; i += units) {
          const TileBlock block = it_.tiles_.block(part.row + i, std::min(units, part.rows - i));
          transform_images(image, block);
          for (int64_t p = 0; p < kPlaces; ++p) multiply(image, result, p, packed, block);
          transform_results(result, block, taken);
        }
      }
    }

   private:
    // The panels of a place, a depth of the windows, and the steps from `step` on.
    T* panels(const PackedColumns& packed, int64_t place, int64_t tap, int64_t step) const {
      return weight_ + ((place * it_.tiles_.taps + tap) * it_.channels_ + step) * packed.padded();
    }

    // Transforms the weight of one depth of the windows.
    void transform_weight(const PackedColumns& packed, int64_t tap, int64_t columns) {
      depth_ = it_.is_turned_ ? it_.tiles_.taps - 1 - tap : tap;
      it_.is_turned_ ? transform_by_steps(packed, tap, columns)
                     : transform_by_panels(packed, tap, columns);
    }

    // Each row of the weight is a column of the products.
    void transform_by_panels(const PackedColumns& packed, int64_t tap, int64_t columns) {
      const int64_t panel = it_.kernels_.panel_width, row = spread_row<T>(it_.channels_);
      for (int64_t j = 0; j < columns; j += panel) {
        const int64_t count = std::min(panel, columns - j);
        for (int64_t i = 0; i < count; ++i) {
          transform_taps(column_ + j + i, 0, it_.channels_, spread_ + i * row, panel * row);
        }
        for (int64_t p = 0; p < kPlaces; ++p) {
          for (int64_t step = 0; step < it_.channels_; step += it_.steps_) {
            const int64_t steps = std::min(it_.steps_, it_.channels_ - step);
            it_.kernels_.pack({.to = panels(packed, p, tap, step) + j * steps,
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
    void transform_by_steps(const PackedColumns& packed, int64_t tap, int64_t columns) {
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
            it_.kernels_.pack(
                {.to = panels(packed, p, tap, step) + j * steps + (first - step) * width,
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
      const T* const from =
          operands_.weight + row * strides[0] + column * strides[1] + depth_ * strides[2];
      for (int64_t tap = 0; tap < 9; ++tap) {
        const T* const first = from + tap / 3 * strides[3] + tap % 3 * strides[4];
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

    void transform_images(const Block<T>& images, const TileBlock& block) const {
      const Tiles& tiles = it_.tiles_;
      tiles.for_each(block, block.planes + tiles.taps - 1, [&](int64_t i, const Pixel& at) {
        std::array<const T*, kPlaces> pixels;
        it_.image_.template find<4, const T>(pixels.data(), operands_.image, zeros_,
                                             tiles.in_image(at));
        std::array<T*, kPlaces> rows;
        point_into(rows, images.at(0, i), images.place);
        it_.kernels_.tiles.image(pixels.data(), rows.data(), it_.channels_);
      });
    }

    void multiply(const Block<T>& images, const Block<T>& results, int64_t place,
                  const PackedColumns& packed, const TileBlock& block) const {
      for (int64_t tap = 0; tap < it_.tiles_.taps; ++tap) {
        // Without channels the sums are of no steps.
        for (int64_t step = 0; step == 0 || step < it_.channels_; step += it_.steps_) {
          PanelProduct<T> product{};
          product.c = results.at(place, 0);
          product.c_row = product.start_row = results.row;
          product.start = tap > 0 || step > 0 ? product.c : nullptr;
          product.a = images.at(place, tap * block.count) + step;
          product.a_row = images.row;
          product.a_column = 1;
          product.m = block.size(block.planes);
          product.k = std::min(it_.steps_, it_.channels_ - step);
          packed.multiply(it_.kernels_, product, panels(packed, place, tap, step));
        }
      }
    }

    void transform_results(const Block<T>& results, const TileBlock& block, int64_t columns) {
      it_.tiles_.for_each(block, block.planes, [&](int64_t i, const Pixel& at) {
        std::array<const T*, kPlaces + 1> from;
        point_into<const T*>(from, results.at(0, i), results.place);
        from[kPlaces] = operands_.bias != nullptr ? operands_.bias + column_ : zeros_;
        std::array<T*, 4> pixels;
        it_.result_.template find<2, T>(pixels.data(), operands_.result + column_, unread_, at);
        if (it_.kernels_.tiles.result(from.data(), pixels.data(), columns) == T(0)) return;
        for (int64_t pixel = 0; pixel < 4; ++pixel) {
          if (pixels[pixel] == unread_) continue;
          compute(pixels[pixel], columns, {at.n, at.z, at.y + pixel / 2, at.x + pixel % 2});
        }
      });
    }

    // Computes a pixel of the result by the definition.
    void compute(T* to, int64_t columns, const Pixel& at) const {
      const T* const start = operands_.bias != nullptr ? operands_.bias + column_ : zeros_;
      std::copy_n(start, columns, to);
      const auto& strides = it_.weight_strides_;
      const int64_t along = strides[it_.is_turned_ ? 0 : 1];
      const int64_t across = strides[it_.is_turned_ ? 1 : 0];
      const int64_t num_taps = 9 * it_.tiles_.taps;
      for (int64_t depth = 0; depth < it_.tiles_.taps; ++depth) {
        std::array<const T*, 9> pixels;
        Pixel from_image = it_.tiles_.in_image(at);
        from_image.z += depth;
        it_.image_.template find<3, const T>(pixels.data(), operands_.image, zeros_, from_image);
        for (int64_t tap = 0; tap < 9; ++tap) {
          if (pixels[tap] == zeros_) continue;
          const int64_t all = 9 * depth + tap, from = it_.is_turned_ ? num_taps - 1 - all : all;
          const T* const weight = operands_.weight + from / 9 * strides[2] +
                                  from % 9 / 3 * strides[3] + from % 3 * strides[4] +
                                  column_ * across;
          for (int64_t step = 0; step < it_.channels_; ++step) {
            const T pixel = pixels[tap][step];
            const T* const row = weight + step * along;
            for (int64_t j = 0; j < columns; ++j) to[j] += pixel * row[j * across];
          }
        }
      }
    }

    const WinogradConvolution& it_;
    const Operands& operands_;
    int64_t column_ = 0;  // of the result: the first one of the block
    int64_t depth_ = 0;   // of the windows: that whose weight is transformed
    T *weight_ = nullptr, *spread_ = nullptr, *taps_ = nullptr;
    T *zeros_ = nullptr, *unread_ = nullptr;  // what is read outside of images, and written there
  };

  const Kernels<T>& kernels_;
  const Pixels<T> image_, result_;
  const Tiles tiles_;
  bool is_turned_, has_bias_;
  int64_t channels_ = 0, columns_ = 0, steps_ = 0;
  std::array<int64_t, 5> weight_strides_{};
};

// ---- the gradient of the weight

template <typename T>
class WinogradWeightGrad final : public Kernel {
 public:
  explicit WinogradWeightGrad(const BoundNode& bound)
      : kernels_(kernels<T>(isa_of(bound))),
        gradient_(bound.inputs.at(0)),
        image_(bound.inputs.at(1)),
        tiles_(bound.inputs[0], pads_of(bound)) {
    const Layout &gradient = bound.inputs[0], &image = bound.inputs[1],
                 &weight = bound.outputs.at(0);
    rows_ = gradient.sizes.at(1);
    channels_ = image.sizes.at(1);
    std::vector<int64_t> want(image.sizes.size(), 3);
    want[0] = rows_;
    want[1] = channels_;
    ORT_CHECK(weight.sizes == want &&
                  gradient.sizes == result_sizes(image, rows_, pads_of(bound)) &&
                  is_side_by_side(gradient) && is_side_by_side(image) &&
                  gradient.dtype == weight.dtype && image.dtype == weight.dtype,
              "WinogradWeightGrad: the operands do not fit together");
    for (const char* name : {"strides", "dilations"}) {
      const ir::Shape numbers = ir::ints_attr(bound.node.attrs, name, {});
      const bool moves = std::any_of(numbers.begin(), numbers.end(),
                                     [](const ir::Dim& number) { return !(number == ir::Dim(1)); });
      ORT_CHECK(!moves && ir::int_attr(bound.node.attrs, "groups", 1) == 1,
                "WinogradWeightGrad: want neither strides, dilation nor groups");
    }
    strides_ = strides_of(weight);
    by_definition_ = make_by_definition(bound);
    const int64_t numbers = std::max<int64_t>(1, tiles_.taps * rows_ * channels_);
    const int64_t most =
        std::min({kMostParts, kSums / numbers, tiles_.count() / kPartTiles, tiles_.num_units()});
    while (2 * parts_ <= most) parts_ *= 2;  // so that threads have equally many
  }

  std::string str() const override {
    return concat("Winograd weight gradient, ", tiles_.batch, " images of ", channels_, " x ",
                  tiles_.is_volume ? concat(image_.depth, " x ") : "", image_.height, " x ",
                  image_.width, ", ", rows_, " rows, ", tiles_.count(), " tiles\n");
  }

  void run(const void* const* inputs, void* const* outputs) const override {
    const Operands operands{static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]),
                            static_cast<T*>(outputs[0])};
    const int64_t tiles = tiles_.count();
    if (rows_ == 0 || channels_ == 0) return;
    if (tiles == 0) return run_by_definition(inputs, outputs);
    const int64_t work = kPlaces * tiles_.taps * tiles * rows_ * channels_;
    const int64_t wanted = std::clamp<int64_t>(work / kWorkPerThread, 1, num_threads());
    const Grid grid(rows_, channels_, ceil_div(wanted, parts_), rows_, kernels_.product_rows,
                    kernels_.panel_width);
    const int64_t size = tiles_.taps * Block<T>::size(rows_, channels_);
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
      parallel_for(0, rows_, ceil_div(rows_, wanted), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (!add_parts(sums, size, row, operands.weight)) is_finite = false;
        }
      });
    }
    if (!is_finite) run_by_definition(inputs, outputs);
  }

 private:
  struct Operands {
    const T *gradient, *image;
    T* weight;
  };

  // The kernel of the definition, whose result is channels-last.
  static std::unique_ptr<const Kernel> make_by_definition(const BoundNode& bound) {
    std::vector<Layout> outputs = bound.outputs;
    Layout& weight = outputs.at(0);
    int64_t stride = weight.sizes[1];
    weight.strides[1] = 1;
    for (size_t dim = weight.sizes.size() - 1; dim > 1; --dim) {
      weight.strides[dim] = stride;
      stride *= weight.sizes[dim];
    }
    weight.strides[0] = stride;
    return make_convolution_weight_grad({bound.node, bound.inputs, outputs, bound.options});
  }

  void run_by_definition(const void* const* inputs, void* const* outputs) const {
    const int64_t plane = 9 * channels_;  // the numbers of a row for one depth of the windows
    T* const found = thread_memory<T, Use::kConverted>(rows_ * tiles_.taps * plane);
    void* const result = found;
    by_definition_->run(inputs, &result);
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t depth = 0; depth < tiles_.taps; ++depth) {
        put_row(static_cast<T*>(outputs[0]) + row * strides_[0] + depth * strides_[2],
                found + (row * tiles_.taps + depth) * plane, channels_);
      }
    }
  }

  // Puts `n` channels of the gradient in their places, given side by side for each tap of a plane.
  void put_row(T* to, const T* taps, int64_t n) const {
    std::array<int64_t, 9> places;
    for (int64_t tap = 0; tap < 9; ++tap) {
      places[tap] = tap / 3 * strides_[3] + tap % 3 * strides_[4];
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t tap = 0; tap < 9; ++tap) to[i * strides_[1] + places[tap]] = taps[tap * n + i];
    }
  }

  // Computes a part of the gradient from a part of the tiles: its sums, if there is memory for
  // them, else what they amount to. Returns whether what it writes into the gradient is finite.
  bool multiply(const Operands& operands, const Rectangle& part, int64_t tile_part, T* to) const {
    const int64_t all_units = tiles_.num_units();  // at least one for each part
    const int64_t begin = all_units * tile_part / parts_;
    const int64_t end = all_units * (tile_part + 1) / parts_;
    const int64_t units = tiles_.units_in_block(ceil_div(all_units, parts_), 1);
    const int64_t tiles = tiles_.most_tiles(units), of_image = tiles_.most_of_image(units);
    const int64_t height = even_part(part.rows, kRows, kernels_.product_rows);
    const int64_t width =
        even_part(part.columns, kColumns / (tiles_.is_volume ? 2 : 1), kernels_.panel_width);
    const Block<T> left(thread_memory<T, Use::kLeft>(Block<T>::size(tiles, height)), tiles, height);
    const Block<T> right(thread_memory<T, Use::kRight>(Block<T>::size(of_image, width)), of_image,
                         width);
    const int64_t own_size = Block<T>::size(height, width);
    const Block<T> own(
        to == nullptr ? thread_memory<T, Use::kSums>(tiles_.taps * own_size) : nullptr, height,
        width);
    const Block<T> all(to, rows_, channels_);
    T* const zeros = thread_memory<T, Use::kImageRow>(std::max(height, width));
    std::fill_n(zeros, std::max(height, width), T(0));
    bool is_finite = true;
    for (int64_t j = 0; j < part.columns; j += width) {
      for (int64_t i = 0; i < part.rows; i += height) {
        const Rectangle block{part.row + i, std::min(height, part.rows - i), part.column + j,
                              std::min(width, part.columns - j)};
        const Block<T> sums = to == nullptr ? own : all.from(block.row, block.column);
        const int64_t next = to == nullptr ? own_size : Block<T>::size(rows_, channels_);
        for (int64_t first = begin; first < end; first += units) {
          const TileBlock some = tiles_.block(first, std::min(units, end - first));
          transform(left, operands.gradient + block.row, right, operands.image + block.column,
                    zeros, some, block);
          for (int64_t tap = 0; tap < tiles_.taps; ++tap) {
            for (int64_t p = 0; p < kPlaces; ++p) {
              add(left.at(p, 0), left.row, right.at(p, tap * some.count), right.row,
                  sums.at(p, 0) + tap * next, sums.row, first > begin, some.size(some.planes),
                  block);
            }
          }
        }
        if (to != nullptr) continue;
        for (int64_t tap = 0; tap < tiles_.taps; ++tap) {
          is_finite = transform_sums(sums, tap * next, operands.weight, tap, block) && is_finite;
        }
      }
    }
    return is_finite;
  }

  // Adds up the sums of all parts for a row of the gradient.
  bool add_parts(T* sums, int64_t size, int64_t row, T* weight) const {
    const Block<T> first(sums, rows_, channels_);
    const int64_t next = Block<T>::size(rows_, channels_);
    bool is_finite = true;
    for (int64_t tap = 0; tap < tiles_.taps; ++tap) {
      for (int64_t part = 1; part < parts_; ++part) {
        for (int64_t p = 0; p < kPlaces; ++p) {
          T* const to = first.at(p, row) + tap * next;
          kernels_.add_rows(to, to + part * size, 1, channels_);
        }
      }
      const Rectangle block{row, 1, 0, channels_};
      is_finite = transform_sums(first.from(row, 0), tap * next, weight, tap, block) && is_finite;
    }
    return is_finite;
  }

  void transform(const Block<T>& left, const T* gradient, const Block<T>& right, const T* image,
                 const T* zeros, const TileBlock& tiles, const Rectangle& block) const {
    tiles_.for_each(tiles, tiles.planes, [&](int64_t i, const Pixel& at) {
      std::array<const T*, 4> pixels;
      std::array<T*, kPlaces> rows;
      gradient_.template find<2, const T>(pixels.data(), gradient, zeros, at);
      point_into(rows, left.at(0, i), left.place);
      kernels_.tiles.gradient(pixels.data(), rows.data(), block.rows);
    });
    tiles_.for_each(tiles, tiles.planes + tiles_.taps - 1, [&](int64_t i, const Pixel& at) {
      std::array<const T*, kPlaces> pixels;
      std::array<T*, kPlaces> rows;
      image_.template find<4, const T>(pixels.data(), image, zeros, tiles_.in_image(at));
      point_into(rows, right.at(0, i), right.place);
      kernels_.tiles.image(pixels.data(), rows.data(), block.columns);
    });
  }

  // sums += left^T right, for `count` tiles.
  void add(const T* left, int64_t left_row, const T* right, int64_t right_row, T* sums,
           int64_t sums_row, bool adds, int64_t count, const Rectangle& block) const {
    PanelProduct<T> product{};
    product.c = sums;
    product.c_row = product.start_row = sums_row;
    product.start = adds ? product.c : nullptr;
    product.a = left;
    product.a_row = 1;
    product.a_column = left_row;
    product.b = right;
    product.b_row = right_row;
    product.b_panel = product.width = kernels_.panel_width;
    product.num_panels = ceil_div(block.columns, kernels_.panel_width);
    product.columns = block.columns;
    product.m = block.rows;
    product.k = count;
    kernels_.multiply(product);
  }

  // `sums` plus `offset` are those of one depth of the windows.
  bool transform_sums(const Block<T>& sums, int64_t offset, T* weight, int64_t depth,
                      const Rectangle& block) const {
    T* const copy = thread_memory<T, Use::kConverted>(9 * block.columns);
    T zeros = 0;
    for (int64_t i = 0; i < block.rows; ++i) {
      std::array<const T*, kPlaces> from;
      point_into<const T*>(from, sums.at(0, i) + offset, sums.place);
      T* const to =
          weight + (block.row + i) * strides_[0] + block.column * strides_[1] + depth * strides_[2];
      std::array<T*, 9> taps;
      for (int64_t tap = 0; tap < 9; ++tap) {
        taps[tap] = strides_[1] == 1 ? to + tap / 3 * strides_[3] + tap % 3 * strides_[4]
                                     : copy + tap * block.columns;
      }
      zeros += kernels_.tiles.weight_gradient(from.data(), taps.data(), block.columns);
      if (strides_[1] != 1) put_row(to, copy, block.columns);
    }
    return zeros == T(0);
  }

  const Kernels<T>& kernels_;
  std::unique_ptr<const Kernel> by_definition_;
  const Pixels<T> gradient_, image_;
  const Tiles tiles_;
  int64_t rows_ = 0, channels_ = 0;
  std::array<int64_t, 5> strides_{};  // of the result
  int64_t parts_ = 1;                 // of the tiles; depends on sizes alone
};

// Throws InternalError unless image, weight and result have the dims of images, or those of
// volumes.
void check_ranks(const BoundNode& bound) {
  const size_t rank = bound.inputs.at(0).sizes.size();
  for (const region::Layout* tensor : {&bound.inputs.at(1), &bound.outputs.at(0)}) {
    ORT_CHECK((rank == 4 || rank == 5) && tensor->sizes.size() == rank, bound.node.op.name,
              ": want images and a weight of 4 dims, or of 5");
  }
}

}  // namespace

std::unique_ptr<const Kernel> make_winograd_convolution(const BoundNode& bound) {
  check_ranks(bound);
  return make_of_dtype<WinogradConvolution>(bound);
}

std::unique_ptr<const Kernel> make_winograd_weight_grad(const BoundNode& bound) {
  check_ranks(bound);
  return make_of_dtype<WinogradWeightGrad>(bound);
}

}  // namespace torch_ort::cpu
