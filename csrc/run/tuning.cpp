#include "run/tuning.h"

#include "run/counters.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <utility>

namespace torch_ort::run {

namespace {

constexpr double kEnoughUs = 30e3;  // after this time small differences are visible
constexpr int64_t kManyRounds = 200;
// Other processes may take the processor from a thread. So timing ends after this many rounds in
// which no kernel has become faster by more than this factor.
constexpr int64_t kSettledRounds = 5;
constexpr double kSettled = 0.95;
constexpr double kClearly = 0.97;  // of the time of the preferred kernel

struct Table {
  std::mutex mutex;
  KernelChoices choices;
};

Table& table() {
  // Never destroyed, because sessions may outlive static variables.
  static Table* one = new Table;
  return *one;
}

double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

}  // namespace

KernelTimes time_in_turns(const std::function<void()>& own, const std::function<void()>& torch,
                          double most_ms, const std::function<double()>& now) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const double limit = most_ms > 0 ? 1000 * most_ms : kNever;
  KernelTimes times{.own_us = kNever, .torch_us = kNever};
  const double start = now();
  double end = start;
  int64_t last_faster = 0;  // the last round in which a kernel became faster
  const auto run = [&](const std::function<void()>& kernel, double& fastest) {
    const double begin = end;
    kernel();
    end = now();
    if (end - begin < kSettled * fastest) last_faster = times.rounds;
    fastest = std::min(fastest, end - begin);
  };
  do {
    ++times.rounds;
    run(own, times.own_us);
    run(torch, times.torch_us);
  } while (times.rounds < kManyRounds && end - start + times.own_us + times.torch_us <= limit &&
           (end - start < kEnoughUs || times.rounds - last_faster < kSettledRounds));
  return times;
}

bool choose_own(const KernelTimes& times, bool prefers_own) {
  return prefers_own ? times.torch_us >= kClearly * times.own_us
                     : times.own_us < kClearly * times.torch_us;
}

bool has_choices() {
  std::lock_guard lock(table().mutex);
  return !table().choices.empty();
}

std::optional<KernelChoice> find_choice(const std::string& product) {
  std::lock_guard lock(table().mutex);
  const auto found = table().choices.find(product);
  return found == table().choices.end() ? std::nullopt : std::optional(found->second);
}

KernelChoices all_choices() {
  std::lock_guard lock(table().mutex);
  return table().choices;
}

int64_t load_choices(const KernelChoices& choices) {
  std::lock_guard lock(table().mutex);
  const size_t before = table().choices.size();
  table().choices.insert(choices.begin(), choices.end());
  const auto added = static_cast<int64_t>(table().choices.size() - before);
  counters().products_loaded.fetch_add(added);
  return added;
}

void forget_choices() {
  std::lock_guard lock(table().mutex);
  table().choices.clear();
}

KernelChoice find_or_measure(const std::string& product, const std::function<void()>& own,
                             const std::function<void()>& torch, bool prefers_own,
                             const Tuning& tuning) {
  static std::mutex measuring;
  std::lock_guard turn(measuring);
  // Another thread may have measured it in the meantime.
  if (const std::optional<KernelChoice> found = find_choice(product)) return *found;
  const KernelTimes times = time_in_turns(own, torch, tuning.most_ms, now_us);
  counters().products_tuned.fetch_add(1);
  std::lock_guard lock(table().mutex);
  const KernelChoice choice{choose_own(times, prefers_own), times.own_us, times.torch_us};
  return table().choices.try_emplace(product, choice).first->second;
}

}  // namespace torch_ort::run
