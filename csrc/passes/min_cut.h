// The cheapest way to part a network: which nodes stay with the source when as little capacity as
// possible leads from them to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_ort::passes {

// Flow by shortest augmenting paths in levels (Dinic, "Algorithm for solution of a problem of
// maximum flow in networks with power estimation", 1970).
class MinCut {
 public:
  static constexpr int kSource = 0, kSink = 1;
  static constexpr int64_t kInfinite = int64_t{1} << 60;

  MinCut() : arcs_of_(2) {}
  int add_node();
  void add_arc(int from, int to, int64_t capacity);
  // By node: whether it stands on the side of the sink. Of several cheapest cuts the one with the
  // fewest nodes there.
  std::vector<bool> sink_side();

 private:
  struct Arc {
    int to;
    int64_t left;  // capacity that no flow takes yet; its opposite is the arc next to it
  };

  bool find_levels();
  int64_t augment(int node, int64_t flow);

  std::vector<Arc> arcs_;
  std::vector<std::vector<int>> arcs_of_;  // by node
  std::vector<int> levels_;
  std::vector<size_t> next_;  // by node: the first arc that may still lead on
};

}  // namespace torch_ort::passes
