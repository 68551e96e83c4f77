// Where the tiles of Winograd convolutions are (cpu/winograd.cpp); internal to cpu/.
#pragma once

#include "base/rounding.h"
#include "cpu/convolution.h"
#include "cpu/grid.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace torch_ort::cpu {

// A pixel of a batch. Images that are no volumes have one plane.
struct Pixel {
  int64_t n, z, y, x;
};

// The pixels of images whose channels lie side by side. Those outside are all at one place.
template <typename T>
struct Pixels {
  explicit Pixels(const region::Layout& layout) {
    const bool is_volume = layout.sizes.size() > 4;
    const size_t first = is_volume ? 3 : 2;  // the dim of the rows of pixels
    depth = is_volume ? layout.sizes[2] : 1;
    height = layout.sizes[first];
    width = layout.sizes[first + 1];
    strides = pixel_strides(layout);
  }

  // The square of pixels of a plane from a place on.
  template <int kSize, typename U>
  void find(U** pixels, U* image, U* outside, const Pixel& at) const {
    const bool has_plane = at.z >= 0 && at.z < depth;
    for (int64_t row = at.y; row < at.y + kSize; ++row) {
      for (int64_t column = at.x; column < at.x + kSize; ++column) {
        const bool is_inside =
            has_plane && row >= 0 && row < height && column >= 0 && column < width;
        *pixels++ = is_inside ? image + at.n * strides[0] + at.z * strides[1] + row * strides[2] +
                                    column * strides[3]
                              : outside;
      }
    }
  }

  std::array<int64_t, 4> strides{};  // of images, planes, rows and pixels
  int64_t depth = 1, height = 0, width = 0;
};

// Tiles of `planes` planes from (n, z) on: in each of them, `count` from number `first` on. Where
// images are no volumes, the numbers go on from one image to the next, and a block has one plane.
struct TileBlock {
  int64_t n = 0, z = 0, planes = 1, first = 0, count = 0;

  int64_t size(int64_t num_planes) const { return num_planes * count; }
};

// The tiles of a result.
struct Tiles {
  Tiles(const region::Layout& result, const std::vector<int64_t>& pads)
      : is_volume(result.sizes.size() > 4), batch(result.sizes[0]), taps(is_volume ? 3 : 1) {
    const size_t first = is_volume ? 3 : 2;
    depth = is_volume ? result.sizes[2] : 1;
    down = ceil_div(result.sizes[first], 2);
    right = ceil_div(result.sizes[first + 1], 2);
    std::copy(pads.begin(), pads.end(), pad.end() - static_cast<int64_t>(pads.size()));
    planes = even_part(depth, kMostPlanes, 1);
    in_plane = even_part(down * right, std::max<int64_t>(1, kMostTiles / planes), 1);
  }

  int64_t count() const { return batch * depth * down * right; }
  // What threads divide: tiles, or blocks of volumes.
  int64_t num_units() const {
    return is_volume ? batch * ceil_div(depth, planes) * ceil_div(down * right, in_plane) : count();
  }
  // The size of blocks, in units.
  int64_t units_in_block(int64_t all, int64_t multiple) const {
    return is_volume ? 1 : even_part(all, kMostTiles, multiple);
  }
  // The most tiles of a result that a block of so many units has.
  int64_t most_tiles(int64_t units) const { return is_volume ? planes * in_plane : units; }
  // And of an image, whose windows reach into other planes.
  int64_t most_of_image(int64_t units) const {
    return is_volume ? (planes + taps - 1) * in_plane : units;
  }

  TileBlock block(int64_t unit, int64_t units) const {
    if (!is_volume) return {.first = unit, .count = units};
    const int64_t across = ceil_div(down * right, in_plane), behind = ceil_div(depth, planes);
    const int64_t first = unit % across * in_plane, z = unit / across % behind * planes;
    return {.n = unit / across / behind,
            .z = z,
            .planes = std::min(planes, depth - z),
            .first = first,
            .count = std::min(in_plane, down * right - first)};
  }

  // Calls body(i, place) for the tiles of `num_planes` planes of a block, with the first pixel of
  // each in the result.
  template <typename F>
  void for_each(const TileBlock& block, int64_t num_planes, const F& body) const {
    for (int64_t plane = 0; plane < num_planes; ++plane) {
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t tile = block.first + i, row = tile / right;
        body(plane * block.count + i,
             Pixel{block.n + row / down, block.z + plane, row % down * 2, tile % right * 2});
      }
    }
  }

  // The first pixel of the image that a tile of the result depends on.
  Pixel in_image(const Pixel& at) const {
    return {at.n, at.z - pad[0], at.y - pad[1], at.x - pad[2]};
  }

  // Of a block; the first is a multiple of the tiles of all instruction sets.
  static constexpr int64_t kMostTiles = 48, kMostPlanes = 8;

  bool is_volume;
  int64_t batch, depth = 1, down = 0, right = 0, taps;
  std::array<int64_t, 3> pad{};      // of planes, rows and columns
  int64_t planes = 1, in_plane = 1;  // of a block of volumes
};

}  // namespace torch_ort::cpu
