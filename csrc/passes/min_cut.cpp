#include "passes/min_cut.h"

#include <algorithm>

namespace torch_ort::passes {

int MinCut::add_node() {
  arcs_of_.emplace_back();
  return static_cast<int>(arcs_of_.size()) - 1;
}

void MinCut::add_arc(int from, int to, int64_t capacity) {
  arcs_of_[from].push_back(static_cast<int>(arcs_.size()));
  arcs_.push_back({to, capacity});
  arcs_of_[to].push_back(static_cast<int>(arcs_.size()));
  arcs_.push_back({from, 0});
}

// Finds how many arcs each node is from the sink; -1 if it cannot be reached. Returns whether the
// source can reach it.
bool MinCut::find_levels() {
  levels_.assign(arcs_of_.size(), -1);
  levels_[kSink] = 0;
  std::vector<int> reached = {kSink};
  for (size_t i = 0; i < reached.size(); ++i) {
    for (int arc : arcs_of_[reached[i]]) {
      const int from = arcs_[arc].to;
      if (arcs_[arc ^ 1].left == 0 || levels_[from] >= 0) continue;
      levels_[from] = levels_[reached[i]] + 1;
      reached.push_back(from);
    }
  }
  return levels_[kSource] >= 0;
}

// Sends up to `flow` from `node` to the sink along arcs to the next level; returns how much.
int64_t MinCut::augment(int node, int64_t flow) {
  if (node == kSink) return flow;
  for (size_t& i = next_[node]; i < arcs_of_[node].size(); ++i) {
    const int arc = arcs_of_[node][i];
    const int to = arcs_[arc].to;
    if (arcs_[arc].left == 0 || levels_[to] != levels_[node] - 1) continue;
    const int64_t more = augment(to, std::min(flow, arcs_[arc].left));
    if (more == 0) continue;
    arcs_[arc].left -= more;
    arcs_[arc ^ 1].left += more;
    return more;
  }
  return 0;
}

std::vector<bool> MinCut::sink_side() {
  while (find_levels()) {
    next_.assign(arcs_of_.size(), 0);
    while (augment(kSource, kInfinite) > 0) {
    }
  }
  // The nodes from which the sink can still be reached.
  std::vector<bool> is_there;
  for (int level : levels_) is_there.push_back(level >= 0);
  return is_there;
}

}  // namespace torch_ort::passes
