// Which of two kernels runs a product, where that has been measured: the engine's own or the one of
// torch. A process has one choice for each kind of product, which all sessions share and which
// never changes while it is there.
#pragma once

#include "run/options.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace torch_ort::run {

// Microseconds of the fastest run of each, and how often both ran.
struct KernelTimes {
  double own_us = 0, torch_us = 0;
  int64_t rounds = 0;
};

struct KernelChoice {
  bool is_own = false;
  double own_us = 0, torch_us = 0;  // as measured, here or where a file was written
};

using KernelChoices = std::map<std::string, KernelChoice>;  // by words for the product

// Runs both in turns until the fastest times of both stay. Only one round is begun that may not end
// within `most_ms` milliseconds, the first; 0: no limit. `now_us` is a clock, in
// microseconds.
KernelTimes time_in_turns(const std::function<void()>& own, const std::function<void()>& torch,
                          double most_ms, const std::function<double()>& now_us);

// Whether the engine's own is to run. What is preferred stays unless the other is clearly faster:
// times of equal kernels differ a little.
bool choose_own(const KernelTimes& times, bool prefers_own);

bool has_choices();
std::optional<KernelChoice> find_choice(const std::string& product);
KernelChoices all_choices();
// Takes in what files hold; what is chosen already stays. Gives how many were new.
int64_t load_choices(const KernelChoices& choices);
// For tests, and where all sessions are given up.
void forget_choices();

// The choice for a product, from the table or by timing; one thread of the process measures at a
// time, since others would disturb it.
KernelChoice find_or_measure(const std::string& product, const std::function<void()>& own,
                             const std::function<void()>& torch, bool prefers_own,
                             const Tuning& tuning);

}  // namespace torch_ort::run
