#include "cpu/parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <mutex>

#if AT_PARALLEL_OPENMP
// What GCC compiles `#pragma omp parallel` to: calls `body` with `data` on `num_threads` threads
// (0: as many as omp_set_num_threads has set, which torch does) and returns when all have ended.
// LLVM's runtime, which some builds of torch load, has it too.
extern "C" void GOMP_parallel(  // NOLINT(readability-identifier-naming)
    void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();
#endif

namespace torch_ort::cpu {

namespace {

using Work = c10::function_ref<void(int64_t, int64_t)>;

#if AT_PARALLEL_OPENMP

struct Range {
  int64_t begin, end, grain;
  Work work;
  std::mutex mutex;  // guards the following member
  std::exception_ptr error{};
};

// The part of the thread that calls it.
void run_part(void* data) {
  Range& range = *static_cast<Range*>(data);
  const int64_t count = range.end - range.begin;
  int64_t parts = omp_get_num_threads();
  if (range.grain > 0) parts = std::min(parts, at::divup(count, range.grain));
  const int64_t size = at::divup(count, parts);
  const int64_t begin = range.begin + omp_get_thread_num() * size;
  if (begin >= range.end) return;
  try {
    range.work(begin, std::min(range.end, begin + size));
  } catch (...) {
    const std::lock_guard lock(range.mutex);
    if (!range.error) range.error = std::current_exception();
  }
}

void run_on_threads(int64_t begin, int64_t end, int64_t grain, Work work) {
  Range range{.begin = begin, .end = end, .grain = grain, .work = work};
  GOMP_parallel(&run_part, &range, 0, 0);
  if (range.error) std::rethrow_exception(range.error);
}

#else

void run_on_threads(int64_t begin, int64_t end, int64_t grain, Work work) {
  at::parallel_for(begin, end, grain, work);
}

#endif

}  // namespace

void parallel_for(int64_t begin, int64_t end, int64_t grain, Work work) {
  if (begin >= end) return;
  at::internal::lazy_init_num_threads();
  const int64_t count = end - begin;
  if (count == 1 || count <= grain || at::in_parallel_region() || at::get_num_threads() == 1) {
    work(begin, end);
    return;
  }
  run_on_threads(begin, end, grain, work);
}

int num_threads() { return at::get_num_threads(); }

}  // namespace torch_ort::cpu
