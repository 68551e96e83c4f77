// Chooses by timing which of two kernels computes a product: the engine's own or torch's. A process
// has one choice for each kind of product, which all sessions share and which does not change.
//
// Nothing is timed unless the user asks (enable_tuning), since another choice gives other bits, and
// a timing is not the same in every run. Both kernels are timed for the sizes that are bound, on
// memory of the same layouts that nothing else reads, with the current number of threads. Because
// the choice is that of the process, equal products of two graphs have equal bits. It can be saved
// to a file, which is also read where tuning is off; the key there is the product as text
// (region::text_of) with instruction set and threads. Choices of another processor or of other
// versions are ignored (torch_ort/engine/tuning.py).
#pragma once

#include "run/options.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace torch_ort::run {

// The fastest run of each kernel in microseconds, and how often both ran.
struct KernelTimes {
  double own_us = 0, torch_us = 0;
  int64_t rounds = 0;
};

struct KernelChoice {
  bool is_own = false;
  double own_us = 0, torch_us = 0;  // as measured by this process or by the one that wrote the file
};

using KernelChoices = std::map<std::string, KernelChoice>;  // by region::text_of the product

// Runs both kernels in turns until the fastest time of each is stable. After the first round,
// begins no round that might exceed `most_ms` milliseconds in all; 0: no limit. `now_us` is a clock
// in microseconds.
KernelTimes time_in_turns(const std::function<void()>& own, const std::function<void()>& torch,
                          double most_ms, const std::function<double()>& now_us);

// Whether to use the engine's kernel. The preferred kernel is kept unless the other is clearly
// faster, since times of equal kernels vary.
bool choose_own(const KernelTimes& times, bool prefers_own);

bool has_choices();
std::optional<KernelChoice> find_choice(const std::string& product);
KernelChoices all_choices();
// Adds choices from a file, but keeps those that exist. Returns how many were new.
int64_t load_choices(const KernelChoices& choices);
// For tests, and for when all sessions are dropped.
void forget_choices();

// The choice for a product, from the table or by timing. One thread of the process times kernels at
// a time, since others would disturb it.
KernelChoice find_or_measure(const std::string& product, const std::function<void()>& own,
                             const std::function<void()>& torch, bool prefers_own,
                             const Tuning& tuning);

}  // namespace torch_ort::run
