#include "cpu/caches.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>

namespace torch_ort::cpu {

namespace {

std::mutex mutex;
std::optional<Caches> planted;

Caches caches_of_processor() {
  // It gives -1 for a name that it does not know.
  const auto size = [](int name) { return std::max<int64_t>(sysconf(name), 0); };
  return {.first_level = size(_SC_LEVEL1_DCACHE_SIZE), .second_level = size(_SC_LEVEL2_CACHE_SIZE)};
}

}  // namespace

Caches caches() {
  static const Caches own = caches_of_processor();
  const std::lock_guard<std::mutex> lock(mutex);
  return planted.value_or(own);
}

void plant_caches(const std::optional<Caches>& caches) {
  const std::lock_guard<std::mutex> lock(mutex);
  planted = caches;
}

}  // namespace torch_ort::cpu
