// The data caches of a core of this processor; internal to cpu/.
#pragma once

#include <cstdint>
#include <optional>

namespace torch_ort::cpu {

// In bytes; 0 where the system does not say.
struct Caches {
  int64_t first_level = 0, second_level = 0;
};

Caches caches();

// Lets kernels that are made from now on believe in other caches, for tests; nullopt: in the
// processor's own.
void plant_caches(const std::optional<Caches>& caches);

}  // namespace torch_ort::cpu
