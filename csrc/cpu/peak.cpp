#include "cpu/peak.h"

#include "base/error.h"
#include "cpu/parallel.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>

namespace torch_ort::cpu {

namespace {

using Clock = std::chrono::steady_clock;
using ir::DType;

// The length of one run, beside which the start of threads is short.
constexpr double kRunSeconds = 2e-3;
// The length of all runs together, of which the fastest counts.
constexpr double kAllSeconds = 15e-3;
constexpr int64_t kHugePage = int64_t{2} << 20;

template <typename Work>
void on_threads(int threads, const Work& work) {
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) work(thread);
  });
}

template <typename Run>
double seconds_of(const Run& run) {
  const Clock::time_point begin = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Seconds of a round in the fastest run, in which each thread does the same rounds. `work` gets a
// thread and a number of rounds. How many rounds a run needs is found on this thread alone, which
// also warms up the processor.
template <typename Work>
double seconds_of_round(int threads, const Work& work) {
  int64_t rounds = 1;
  const auto tried = [&] { return seconds_of([&] { work(0, rounds); }); };
  // A run that took long once may have been interrupted by another process.
  while (tried() < kRunSeconds || tried() < kRunSeconds) rounds *= 2;
  double best = std::numeric_limits<double>::infinity();
  for (double spent = 0; spent < kAllSeconds;) {
    const double seconds =
        seconds_of([&] { on_threads(threads, [&](int64_t thread) { work(thread, rounds); }); });
    best = std::min(best, seconds / static_cast<double>(rounds));
    spent += seconds;
    if (seconds >= kRunSeconds / 2) continue;
    // On a busy machine both tries were interrupted, so that mostly the start of threads has been
    // measured.
    rounds *= 2;
    spent = 0;
  }
  return best;
}

int threads_or_all(int threads) {
  const int all = num_threads();
  if (threads >= 0 && threads <= all) return threads == 0 ? all : threads;
  throw UserError(concat("peak: threads: got ", threads, ", want 1 to ", all, ", or 0 for all"));
}

const RegisterLoop& loop_of(DType dtype, Isa isa) {
  if (dtype == DType::kDouble) return kernels<double>(isa).peak;
  if (dtype == DType::kBFloat16 && pair_kernels(isa) != nullptr) return pair_kernels(isa)->peak;
  if (ir::is_float(dtype)) return kernels<float>(isa).peak;
  throw UserError(concat("peak: dtype: got ", ir::name(dtype),
                         ", want one of float32, float64, bfloat16, float16"));
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

// Memory in huge pages where the system has them, as the engine's own memory.
Memory allocate(int64_t num_bytes) {
  const int64_t size = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  Memory memory(static_cast<char*>(std::aligned_alloc(kHugePage, size)));
  if (memory == nullptr) throw UserError(concat("peak: no memory for arrays of ", size, " bytes"));
  madvise(memory.get(), size, MADV_HUGEPAGE);
  return memory;
}

// The size of the last-level cache that the cores of this processor share. On AMD processors
// sysconf would add up those of the whole package.
int64_t last_cache_bytes() {
  constexpr int64_t kCommon = 32;
  int64_t kilobytes = 0;
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kilobytes;
  return kilobytes > 0 ? kilobytes << 10 : kCommon << 20;
}

// More bytes than the caches of all threads hold, some of which may have a last-level cache of
// their own.
int64_t past_caches(int threads) {
  constexpr int64_t kOfThread = int64_t{32} << 20;
  return std::max(4 * last_cache_bytes(), threads * kOfThread);
}

void copy_by_caches(char* to, const char* from, int64_t num_bytes) {
  std::memcpy(to, from, num_bytes);
}

}  // namespace

double peak_flops(DType dtype, Isa isa, int threads) {
  const RegisterLoop& loop = loop_of(dtype, isa);
  threads = threads_or_all(threads);
  const double seconds =
      seconds_of_round(threads, [&](int64_t, int64_t rounds) { loop.run(rounds); });
  return static_cast<double>(threads * loop.operations) / seconds;
}

double copy_speed(int64_t num_bytes, int threads) {
  if (num_bytes < 1) throw UserError(concat("peak: bytes: got ", num_bytes, ", want 1 or more"));
  threads = threads_or_all(threads);
  constexpr int64_t kLine = 64;
  const int64_t copied = std::min(num_bytes, past_caches(threads)) / 2 / threads;
  const int64_t part = std::max(copied / kLine * kLine, kLine);
  const Memory from = allocate(part * threads), to = allocate(part * threads);
  // Each page is first touched by the thread that uses it.
  on_threads(threads, [&](int64_t thread) {
    std::memset(from.get() + thread * part, 1, part);
    std::memset(to.get() + thread * part, 2, part);
  });
  // Other copies read a line of the target into the caches before they write it. That takes time
  // which is not needed if no cache has the target.
  const auto copy_past_caches = kernels<float>(best_isa()).copy_past_caches;
  const auto seconds_of_copies = [&](auto copy) {
    return seconds_of_round(threads, [&](int64_t thread, int64_t rounds) {
      for (int64_t round = 0; round < rounds; ++round) {
        copy(to.get() + thread * part, from.get() + thread * part, part);
        // Without this the compiler might copy once for all rounds.
        asm volatile("" ::: "memory");
      }
    });
  };
  const double seconds =
      std::min(seconds_of_copies(copy_by_caches), seconds_of_copies(copy_past_caches));
  return static_cast<double>(2 * part * threads) / seconds;
}

}  // namespace torch_ort::cpu
