#include "passes/border/network.h"

#include "passes/min_cut.h"

#include <cmath>

namespace torch_ort::passes {

namespace {

// The unit of capacities is a hundredth of a nanosecond: a tenth of the time in which a byte moves.
constexpr double kUnits = 1e5;

int64_t capacity(double cost) {
  return cost == kNever ? MinCut::kInfinite : std::llround(cost * kUnits);
}

}  // namespace

std::vector<bool> cheapest_reruns(const std::vector<Rerun>& nodes,
                                  const std::vector<Save>& values) {
  MinCut cut;
  // Each node and each value has a node in the cut. If that of a node is on the sink's side, it
  // runs again; if only that of its value is, the value is saved.
  std::vector<int> run, read;
  for (const Rerun& node : nodes) {
    run.push_back(cut.add_node());
    cut.add_arc(MinCut::kSource, run.back(), capacity(node.cost));
  }
  for (const Save& value : values) {
    read.push_back(cut.add_node());
    const int from = value.producer < 0 ? MinCut::kSource : run[value.producer];
    cut.add_arc(from, read.back(), capacity(value.cost));
    if (value.is_wanted) cut.add_arc(read.back(), MinCut::kSink, MinCut::kInfinite);
  }
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].cost == kNever) continue;
    for (int input : nodes[i].inputs) cut.add_arc(read[input], run[i], MinCut::kInfinite);
  }
  const std::vector<bool> is_with_sink = cut.sink_side();
  std::vector<bool> runs(nodes.size(), false);
  for (size_t i = 0; i < nodes.size(); ++i) runs[i] = is_with_sink[run[i]];
  return runs;
}

}  // namespace torch_ort::passes
