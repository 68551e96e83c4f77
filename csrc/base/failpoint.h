// Failpoints: named places at which tests make the engine fail. A place costs one atomic load where
// no test has installed a function.
#pragma once

#include <atomic>
#include <functional>
#include <string_view>

namespace torch_ort {

// The function that a test installs. It is called with the name of each place that is reached, and
// what it throws is thrown from there.
using Failpoint = std::function<void(std::string_view place)>;

inline std::atomic<const Failpoint*> failpoint{nullptr};

inline void may_fail(std::string_view place) {
  const Failpoint* installed = failpoint.load(std::memory_order_relaxed);
  if (installed != nullptr) [[unlikely]]
    (*installed)(place);
}

}  // namespace torch_ort
