#include "cuda/settings.h"

#include "base/error.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace torch_ort::cuda {

namespace {

struct State {
  std::mutex mutex;
  Settings settings;
  bool is_open = false;
};

// Never destroyed, because threads that compile may outlive it.
State& state() {
  static auto* each = new State;
  return *each;
}

std::atomic<bool> wide_products = false;

void check_same(const char* name, const std::string& got, const std::string& open) {
  if (got == open) return;
  throw UserError(concat("cuda: ", name, ": got '", got, "', want '", open,
                         "', which this process has loaded; set it before the first use of CUDA"));
}

}  // namespace

void configure(Settings settings) {
  State& each = state();
  const std::lock_guard lock(each.mutex);
  if (each.is_open) {
    check_same("libcuda", settings.libcuda, each.settings.libcuda);
    check_same("nvrtc", settings.nvrtc, each.settings.nvrtc);
  }
  each.settings = std::move(settings);
}

Settings settings() {
  State& each = state();
  const std::lock_guard lock(each.mutex);
  return each.settings;
}

Settings settings_of_libraries() {
  State& each = state();
  const std::lock_guard lock(each.mutex);
  each.is_open = true;
  return each.settings;
}

void set_wide_products(bool are_there) { wide_products = are_there; }

bool has_wide_products() { return wide_products; }

}  // namespace torch_ort::cuda
