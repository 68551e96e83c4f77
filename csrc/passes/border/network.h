// Which nodes of the forward half the backward half runs again, and which values are saved for it
// instead, so that both together cost least. A minimum cut chooses.
#pragma once

#include <limits>
#include <span>
#include <vector>

namespace torch_ort::passes {

// The cost of what must not be. Other costs are in microseconds.
constexpr double kNever = std::numeric_limits<double>::infinity();

// A node that could run again. What it reads is then saved, or made again as well.
struct Rerun {
  double cost = kNever;
  std::span<const int> inputs;  // positions among the values
};

// A value that could be saved.
struct Save {
  int producer = -1;  // position among the nodes; -1: the caller's
  double cost = kNever;
  bool is_wanted = false;  // the backward half reads it in any case
};

// By node, whether it runs again. Of several choices that cost the same, the one with the fewest
// nodes.
std::vector<bool> cheapest_reruns(const std::vector<Rerun>& nodes, const std::vector<Save>& values);

}  // namespace torch_ort::passes
