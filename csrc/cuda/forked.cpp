#include "cuda/forked.h"

#include "base/error.h"

#include <pthread.h>

#include <atomic>

namespace torch_ort::cuda {

namespace {

std::atomic<bool> forked{false};

}  // namespace

void note_use() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

bool was_forked() { return forked.load(std::memory_order_relaxed); }

void check_not_forked() {
  if (!was_forked()) [[likely]]
    return;
  throw DeviceError(
      "cuda: this process was forked from one that had used CUDA, and cannot use it; start it with "
      "the method 'spawn' or 'forkserver'");
}

}  // namespace torch_ort::cuda
