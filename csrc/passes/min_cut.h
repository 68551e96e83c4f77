// The minimum cut of a network: which nodes are on the side of the source when the capacity of the
// arcs from there to the other side is least.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ort::passes {

// Finds the maximum flow by shortest augmenting paths in levels (Dinic, "Algorithm for solution of
// a problem of maximum flow in networks with power estimation", 1970).
class MinCut {
 public:
  static constexpr int kSource = 0, kSink = 1;
  static constexpr int64_t kInfinite = int64_t{1} << 60;

  MinCut() : arcs_of_(2) {}
  int add_node();
  void add_arc(int from, int to, int64_t capacity);
  // By node: whether it is on the side of the sink. Of several minimum cuts, the one with the
  // fewest nodes there.
  std::vector<bool> sink_side();

 private:
  struct Arc {
    int to;
    // The remaining capacity. Arcs are stored in pairs: the reverse of an arc is next to it.
    int64_t left;
  };

  bool find_levels();
  int64_t augment(int node, int64_t flow);

  std::vector<Arc> arcs_;
  std::vector<std::vector<int>> arcs_of_;  // by node
  std::vector<int> levels_;
  std::vector<size_t> next_;  // by node: the first arc that may still lead to the sink
};

}  // namespace torch_ort::passes
