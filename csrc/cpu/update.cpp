#include "cpu/update.h"

#include "base/error.h"
#include "cpu/thread_memory.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>

namespace torch_ort::cpu {

namespace {

constexpr int64_t kTile = 2048;         // elements; four arrays of them stay in the first cache
constexpr int64_t kTilesPerThread = 8;  // less is not worth another thread
constexpr size_t kMaxArrays = 5;

template <typename T>
constexpr ir::DType kComputed = std::is_same_v<T, double> ? ir::DType::kDouble : ir::DType::kFloat;

using ir::DType;

template <typename Rule>
bool is_double(const Update<Rule>& update) {
  ORT_CHECK(update.arrays.size() >= 2 && update.arrays.size() <= kMaxArrays, "optimizer step: got ",
            update.arrays.size(), " arrays of a parameter");
  size_t doubles = 0;
  for (const Array& each : update.arrays) {
    doubles += each.dtype == DType::kDouble ? 1 : 0;
    ORT_CHECK(each.dtype == DType::kDouble || each.dtype == DType::kFloat ||
                  each.dtype == DType::kBFloat16 || each.dtype == DType::kHalf,
              "optimizer step: got an array of ", ir::name(each.dtype));
  }
  ORT_CHECK(doubles == 0 || doubles == update.arrays.size(),
            "optimizer step: got some arrays of float64 and some of less");
  return doubles != 0;
}

template <typename T>
using Pointers = std::array<T*, kMaxArrays>;

template <typename T>
void apply(const Kernels<T>& kernels, const Pointers<T>& at, int64_t n, const SgdRule& rule) {
  kernels.sgd(at[0], at[1], at[2], n, rule);
}

template <typename T>
void apply(const Kernels<T>& kernels, const Pointers<T>& at, int64_t n, const AdamRule& rule) {
  kernels.adam(at[0], at[1], at[2], at[3], at[4], n, rule);
}

// Where they lie if they hold what is computed in, else through registers.
template <typename T, typename Rule>
void run_tile(const Kernels<T>& kernels, const Update<Rule>& update, int64_t begin, int64_t n) {
  Pointers<T> at{};
  T* registers = thread_memory<T, Use::kRegisters>(kTile * static_cast<int64_t>(kMaxArrays));
  for (size_t i = 0; i < update.arrays.size(); ++i) {
    const Array& each = update.arrays[i];
    void* const from = static_cast<char*>(each.data) + begin * ir::size_bytes(each.dtype);
    at[i] = static_cast<T*>(from);
    if (each.dtype == kComputed<T>) continue;
    at[i] = registers + static_cast<int64_t>(i) * kTile;
    kernels.load[static_cast<size_t>(each.dtype)](at[i], from, {.n = n});
  }
  apply(kernels, at, n, update.rule);
  for (size_t i = 0; i < update.arrays.size(); ++i) {
    const Array& each = update.arrays[i];
    if (i == 1 || each.dtype == kComputed<T>) continue;
    void* const to = static_cast<char*>(each.data) + begin * ir::size_bytes(each.dtype);
    kernels.store[static_cast<size_t>(each.dtype)](to, at[i], {.n = n});
  }
}

// Tiles of all parameters stand one behind the other, so that many small parameters share the
// threads as a large one does.
template <typename Rule>
void run_all(const std::vector<Update<Rule>>& updates, Isa isa) {
  std::vector<int64_t> ends;
  std::vector<uint8_t> doubles;
  for (const Update<Rule>& each : updates) {
    const int64_t before = ends.empty() ? 0 : ends.back();
    ends.push_back(before + (each.count + kTile - 1) / kTile);
    doubles.push_back(is_double(each) ? 1 : 0);
  }
  const auto run_from = [&](size_t update, int64_t element) {
    const Update<Rule>& each = updates[update];
    const int64_t n = std::min(kTile, each.count - element);
    if (doubles[update] != 0) return run_tile(kernels<double>(isa), each, element, n);
    run_tile(kernels<float>(isa), each, element, n);
  };
  at::parallel_for(
      0, ends.empty() ? 0 : ends.back(), kTilesPerThread, [&](int64_t begin, int64_t end) {
        size_t update = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
        for (int64_t tile = begin; tile < end; ++tile) {
          while (ends[update] <= tile) ++update;
          run_from(update, (tile - (update == 0 ? 0 : ends[update - 1])) * kTile);
        }
      });
}

}  // namespace

void run(const std::vector<Update<SgdRule>>& updates, Isa isa) { run_all(updates, isa); }
void run(const std::vector<Update<AdamRule>>& updates, Isa isa) { run_all(updates, isa); }

}  // namespace torch_ort::cpu
