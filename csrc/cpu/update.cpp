#include "cpu/update.h"

#include "base/error.h"
#include "cpu/parallel.h"
#include "cpu/thread_memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <type_traits>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kTile = 2048;  // in elements; four arrays of them stay in the first-level cache
constexpr int64_t kTilesPerThread = 8;  // fewer tiles are not worth another thread
constexpr size_t kMaxArrays = 5;

template <typename T>
constexpr ir::DType kComputed = std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

using ir::DType;

// Whether the update is computed in float64.
bool is_double(const std::vector<Array>& arrays) {
  size_t doubles = 0;
  for (const Array& each : arrays) {
    doubles += each.dtype == DType::kDouble ? 1 : 0;
    ORT_CHECK(ir::is_float(each.dtype), "optimizer step: got an array of ", ir::name(each.dtype));
  }
  ORT_CHECK(doubles == 0 || doubles == arrays.size(),
            "optimizer step: got some arrays of float64 and some of less");
  return doubles != 0;
}

template <typename Rule>
bool is_double(const Update<Rule>& update) {
  ORT_CHECK(update.arrays.size() >= 2 && update.arrays.size() <= kMaxArrays, "optimizer step: got ",
            update.arrays.size(), " arrays of a parameter");
  return is_double(update.arrays);
}

bool is_double(const Numbers& numbers) { return is_double(std::vector<Array>{numbers.array}); }

template <typename Rule>
bool needs_no_registers(const Update<Rule>& update) {
  const DType computed = is_double(update) ? DType::kDouble : DType::kFloat;
  return std::all_of(update.arrays.begin(), update.arrays.end(),
                     [&](const Array& each) { return each.dtype == computed; });
}

bool needs_no_registers(const Numbers& numbers) {
  return numbers.array.dtype == (is_double(numbers) ? DType::kDouble : DType::kFloat);
}

template <typename T>
using Pointers = std::array<T*, kMaxArrays>;

void* at_element(const Array& array, int64_t element) {
  return static_cast<char*>(array.data) + element * ir::size_bytes(array.dtype);
}

// The numbers of an array in the type that is computed in: in place if they have this type, else in
// `registers`.
template <typename T>
T* load(const Kernels<T>& kernels, const Array& array, int64_t begin, int64_t n, T* registers) {
  void* const from = at_element(array, begin);
  if (array.dtype == kComputed<T>) return static_cast<T*>(from);
  kernels.load[static_cast<size_t>(array.dtype)](registers, from, {.n = n});
  return registers;
}

template <typename T>
void store(const Kernels<T>& kernels, const Array& array, int64_t begin, int64_t n, const T* a) {
  if (array.dtype == kComputed<T>) return;
  kernels.store[static_cast<size_t>(array.dtype)](at_element(array, begin), a, {.n = n});
}

template <typename T>
T* tile_registers() {
  return thread_memory<T, Use::kRegisters>(kTile * static_cast<int64_t>(kMaxArrays));
}

template <typename T>
Pointers<T> load_all(const Kernels<T>& kernels, const std::vector<Array>& arrays, int64_t begin,
                     int64_t n) {
  Pointers<T> at{};
  T* const registers = tile_registers<T>();
  for (size_t i = 0; i < arrays.size(); ++i) {
    at[i] = load(kernels, arrays[i], begin, n, registers + static_cast<int64_t>(i) * kTile);
  }
  return at;
}

// The tiles of all parameters are divided among the threads as one sequence, so that many small
// parameters are divided as evenly as a large one. Calls run(kernels, each, tile, first element,
// number of elements). If `joins_tiles`, it is called only once for successive tiles that are
// computed in place.
template <typename Each, typename F>
void for_each_tile(const std::vector<Each>& all, const std::vector<int64_t>& ends, Isa isa,
                   const F& run, bool joins_tiles = false) {
  std::vector<uint8_t> doubles, joined;
  for (const Each& each : all) {
    doubles.push_back(is_double(each) ? 1 : 0);
    joined.push_back(joins_tiles && needs_no_registers(each) ? 1 : 0);
  }
  const auto run_tiles = [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t tile = begin, next = begin; tile < end; tile = next) {
      while (ends[i] <= tile) ++i;
      next = joined[i] != 0 ? std::min(end, ends[i]) : tile + 1;
      const int64_t element = (tile - (i == 0 ? 0 : ends[i - 1])) * kTile;
      const int64_t n = std::min((next - tile) * kTile, all[i].count - element);
      if (doubles[i] != 0) {
        run(kernels<double>(isa), all[i], tile, element, n);
      } else {
        run(kernels<float>(isa), all[i], tile, element, n);
      }
    }
  };
  parallel_for(0, ends.empty() ? 0 : ends.back(), kTilesPerThread, run_tiles);
}

// For each array, the number of the tile after its last one.
template <typename Each>
std::vector<int64_t> tile_ends(const std::vector<Each>& all) {
  std::vector<int64_t> ends;
  for (const Each& each : all) {
    const int64_t before = ends.empty() ? 0 : ends.back();
    ends.push_back(before + (each.count + kTile - 1) / kTile);
  }
  return ends;
}

template <typename T>
void apply(const Kernels<T>& kernels, const Pointers<T>& at, int64_t n, const SgdRule& rule) {
  kernels.sgd(at[0], at[1], at[2], n, rule);
}

template <typename T>
void apply(const Kernels<T>& kernels, const Pointers<T>& at, int64_t n, const AdamRule& rule) {
  kernels.adam(at[0], at[1], at[2], at[3], at[4], n, rule);
}

template <typename Rule>
void run_all(const std::vector<Update<Rule>>& updates, Isa isa) {
  const auto run = [](const auto& kernels, const auto& update, int64_t, int64_t begin, int64_t n) {
    const std::vector<Array>& arrays = update.arrays;
    const auto at = load_all(kernels, arrays, begin, n);
    apply(kernels, at, n, update.rule);
    for (size_t i = 0; i < arrays.size(); ++i) {
      if (i != 1) store(kernels, arrays[i], begin, n, at[i]);
    }
  };
  for_each_tile(updates, tile_ends(updates), isa, run, /*joins_tiles=*/true);
}

template <typename T>
double sum_tile(const Kernels<T>& kernels, const Array& array, int64_t begin, int64_t n) {
  return kernels.sum_squares(load(kernels, array, begin, n, tile_registers<T>()), n);
}

struct SquaredNorms {
  double parameter = 0, direction = 0;
};

double lamb_rate(const SquaredNorms& squared, const LambRule& rule) {
  const double parameter = std::sqrt(squared.parameter), direction = std::sqrt(squared.direction);
  const double ratio = parameter == 0 || direction == 0 ? 1 : parameter / direction;
  return rule.lr * std::clamp(ratio, rule.ratio_min, rule.ratio_max);
}

}  // namespace

void run(const std::vector<Update<SgdRule>>& updates, Isa isa) { run_all(updates, isa); }
void run(const std::vector<Update<AdamRule>>& updates, Isa isa) { run_all(updates, isa); }

// LAMB passes over memory twice, because the rate of a parameter depends on all of it. The
// direction is computed twice rather than stored, which would be one more write and one more read.
void run(const std::vector<Update<LambRule>>& updates, Isa isa) {
  const std::vector<int64_t> ends = tile_ends(updates);
  std::vector<SquaredNorms> of_tiles(static_cast<size_t>(ends.empty() ? 0 : ends.back()));
  for_each_tile(
      updates, ends, isa,
      [&](const auto& kernels, const auto& update, int64_t tile, int64_t begin, int64_t n) {
        const auto at = load_all(kernels, update.arrays, begin, n);
        auto* const direction = tile_registers<std::decay_t<decltype(*at[0])>>() + 4 * kTile;
        kernels.lamb(direction, at[0], at[1], at[2], at[3], n, update.rule);
        store(kernels, update.arrays[2], begin, n, at[2]);
        store(kernels, update.arrays[3], begin, n, at[3]);
        of_tiles[static_cast<size_t>(tile)] = {kernels.sum_squares(at[0], n),
                                               kernels.sum_squares(direction, n)};
      });
  std::vector<double> rates;  // by tile
  for (size_t i = 0; i < updates.size(); ++i) {
    SquaredNorms sum;
    for (size_t tile = rates.size(); tile < static_cast<size_t>(ends[i]); ++tile) {
      sum.parameter += of_tiles[tile].parameter;
      sum.direction += of_tiles[tile].direction;
    }
    rates.resize(static_cast<size_t>(ends[i]), lamb_rate(sum, updates[i].rule));
  }
  for_each_tile(
      updates, ends, isa,
      [&](const auto& kernels, const auto& update, int64_t tile, int64_t begin, int64_t n) {
        const auto at = load_all(kernels, update.arrays, begin, n);
        auto* const direction = tile_registers<std::decay_t<decltype(*at[0])>>() + 4 * kTile;
        kernels.lamb(direction, at[0], nullptr, at[2], at[3], n, update.rule);
        const SgdRule rule{.lr = rates[static_cast<size_t>(tile)]};
        kernels.sgd(at[0], direction, nullptr, n, rule);
        store(kernels, update.arrays[0], begin, n, at[0]);
      });
}

// The sums of tiles are added in order, so the result does not depend on the number of threads.
double sum_squares(const std::vector<Numbers>& all, Isa isa) {
  const std::vector<int64_t> ends = tile_ends(all);
  std::vector<double> of_tiles(static_cast<size_t>(ends.empty() ? 0 : ends.back()));
  for_each_tile(
      all, ends, isa,
      [&](const auto& kernels, const Numbers& each, int64_t tile, int64_t begin, int64_t n) {
        of_tiles[static_cast<size_t>(tile)] = sum_tile(kernels, each.array, begin, n);
      });
  return std::accumulate(of_tiles.begin(), of_tiles.end(), 0.0);
}

}  // namespace torch_ort::cpu
