#include "plan/discard.h"

#include "plan/program.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torch_ort::plan {

namespace {

class Finder {
 public:
  Finder(const Program& program, const Plan& plan, const std::vector<Block>& blocks,
         const PlanOptions& options)
      : program_(program),
        plan_(plan),
        blocks_(blocks),
        smallest_(options.discard_bytes),
        least_gain_(options.discard_gain),
        border_(program.num_forward),
        num_positions_(static_cast<int>(plan.order.size())),
        dead_(num_positions_ + 1, 0) {}

  std::vector<Discard> run() {
    if (!makes_large_results()) return {};
    find_candidates();
    find_dead();
    const std::vector<int64_t> adopted = adopted_bytes();
    // The least peak that can be reached: adopted memory and the live part of the context area.
    int64_t target = 0;
    for (int at = border_; at < num_positions_; ++at) {
      target = std::max(target, adopted[at] + plan_.context_bytes - dead_[at]);
    }
    return choose(adopted, target);
  }

 private:
  int position_at(int time) const { return time < border_ ? time : time - 1; }

  bool is_large(int tensor) const {
    const Tensor& it = program_.tensors[tensor];
    return it.kind == Kind::kAdopted && it.root < 0 && it.bytes >= smallest_;
  }

  bool makes_large_results() const {
    for (int at = border_; at < num_positions_; ++at) {
      const Step& step = program_.steps[plan_.order[at]];
      const std::vector<int>& writes = step.writes;
      if (step.workspace && own_bytes(step) >= smallest_) return true;
      if (std::any_of(writes.begin(), writes.end(), [this](int t) { return is_large(t); })) {
        return true;
      }
    }
    return false;
  }

  // The adopted bytes that are live at each position, with the memory that a kernel allocates for
  // itself. Kernels that make large results copy their operands and results to layouts of their
  // own.
  std::vector<int64_t> adopted_bytes() const {
    std::vector<int64_t> changes(num_positions_ + 1, 0), bytes(num_positions_, 0);
    std::vector<char> is_known(program_.tensors.size());
    for (int at = 0; at < num_positions_; ++at) {
      const Step& step = program_.steps[plan_.order[at]];
      for (int tensor : step.writes) {
        const Tensor& it = program_.tensors[tensor];
        if (it.kind != Kind::kAdopted || it.root >= 0 || std::exchange(is_known[tensor], 1))
          continue;
        changes[at] += it.bytes;
      }
      for (int tensor : plan_.release[at]) {
        if (program_.tensors[tensor].root < 0) changes[at + 1] -= program_.tensors[tensor].bytes;
      }
    }
    int64_t alive = 0;
    for (int at = 0; at < num_positions_; ++at) {
      alive += changes[at];
      bytes[at] = alive + own_bytes(program_.steps[plan_.order[at]]);
    }
    return bytes;
  }

  int64_t own_bytes(const Step& step) const {
    const auto large = [this](int tensor) { return is_large(tensor); };
    const bool makes_large = std::any_of(step.writes.begin(), step.writes.end(), large);
    if (!step.workspace && !makes_large) return 0;
    if (!makes_large && step.workspace_bytes >= 0) return step.workspace_bytes;
    int64_t bytes = 0;
    for (const std::vector<int>* list : {&step.reads, &step.writes}) {
      for (int tensor : *list) bytes += program_.tensors[root_of(program_, tensor)].bytes;
    }
    return bytes;
  }

  // Finds the parts of each block that no later block takes.
  void find_candidates() {
    for (const Block& block : blocks_) {
      const int position = position_at(block.end);
      if (block.area != Area::kContext || block.delivered || block.end <= border_) continue;
      if (position >= num_positions_) continue;
      int64_t free = block.offset;
      for (const auto& [from, to] : taken_later(block)) {
        if (from - free >= smallest_) candidates_.push_back({position, free, from - free});
        free = std::max(free, to);
      }
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Discard& a, const Discard& b) { return a.position < b.position; });
  }

  std::vector<std::pair<int64_t, int64_t>> taken_later(const Block& block) const {
    const int64_t end = block.offset + block.bytes;
    std::vector<std::pair<int64_t, int64_t>> taken = {{end, end}};
    for (const Block& other : blocks_) {
      const bool is_later = other.area == Area::kContext && other.begin > block.end;
      if (is_later && other.offset < end && other.offset + other.bytes > block.offset) {
        taken.emplace_back(other.offset, other.offset + other.bytes);
      }
    }
    std::sort(taken.begin(), taken.end());
    return taken;
  }

  // The bytes of all candidates before each position.
  void find_dead() {
    for (const Discard& each : candidates_) dead_[each.position + 1] += each.bytes;
    std::partial_sum(dead_.begin(), dead_.end(), dead_.begin());
  }

  // Chooses candidates in order, but only while a later step would exceed the target.
  std::vector<Discard> choose(const std::vector<int64_t>& adopted, int64_t target) const {
    std::vector<int64_t> highest(num_positions_ + 1, 0);  // at this position or later
    for (int at = num_positions_ - 1; at >= border_; --at) {
      highest[at] = std::max(highest[at + 1], adopted[at] + plan_.context_bytes);
    }
    if (highest[border_] - target < least_gain_) return {};
    std::vector<Discard> chosen;
    int64_t gone = 0;
    for (const Discard& each : candidates_) {
      if (highest[each.position + 1] - gone <= target) continue;
      chosen.push_back(each);
      gone += each.bytes;
    }
    return chosen;
  }

  const Program& program_;
  const Plan& plan_;
  const std::vector<Block>& blocks_;
  int64_t smallest_, least_gain_;
  int border_, num_positions_;
  std::vector<Discard> candidates_;
  std::vector<int64_t> dead_;
};

}  // namespace

std::vector<Discard> find_discards(const Program& program, const Plan& plan,
                                   const std::vector<Block>& blocks, const PlanOptions& options) {
  return Finder(program, plan, blocks, options).run();
}

}  // namespace torch_ort::plan
