// Places at which tests make the engine fail. Where no test is at work each costs one load.
#pragma once

#include <atomic>
#include <functional>
#include <string_view>

namespace torch_ort {

// Called with the name of each place that is passed; what it throws is thrown there.
using Failpoint = std::function<void(std::string_view place)>;

inline std::atomic<const Failpoint*> failpoint{nullptr};

inline void may_fail(std::string_view place) {
  const Failpoint* installed = failpoint.load(std::memory_order_relaxed);
  if (installed != nullptr) [[unlikely]]
    (*installed)(place);
}

}  // namespace torch_ort
