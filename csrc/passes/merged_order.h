// The nodes of an acyclic graph in groups that are merged one after the other, such that the groups
// are an acyclic graph too after every merge.
#pragma once

#include <vector>

namespace torch_ort::passes {

// One node must come before another.
struct Arc {
  int from, to;
};

// Keeps the groups in a topological order, so that a search for a path between two groups only
// visits groups that are between them in the order, and a merge only moves those that the search
// has found (Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs",
// 2007).
class MergedOrder {
 public:
  // Each node is a group of its own at first. The nodes are numbered in a topological order.
  MergedOrder(int num_nodes, const std::vector<Arc>& arcs);

  // Merges the groups of two nodes, unless a path from one to the other leads through a third
  // group: then it changes nothing and returns false.
  bool merge(int a, int b);
  // Whether a path from the group of `from` to that of `to` leads through a third group, without
  // that of `without`.
  bool has_path(int from, int to, int without);

 private:
  static constexpr int kNone = -1;

  // Numbers by node, one list after the other.
  struct Lists {
    std::vector<int> starts, items;
  };

  static Lists neighbors(int num_nodes, const std::vector<Arc>& arcs, int Arc::* node,
                         int Arc::* neighbor);
  // Finds all groups that `from` reaches and that are between the two in the order. Returns false
  // if one of them has an arc to `to`. It does not go through `without`.
  bool collect(int from, int to, const Lists& neighbors, std::vector<int>& found,
               int without = kNone);
  // Gives the groups before the merged one, that one, and those after it the places that they have
  // together.
  void move(int kept, int gone);
  void sort(std::vector<int>& groups) const;
  void join(int kept, int gone);

  Lists successors_, predecessors_;  // by node
  std::vector<int> group_of_;        // by node
  std::vector<int> next_member_;     // by node: the next one of its group, in a circle
  std::vector<int> place_;           // by group: its place in the order
  std::vector<int> search_of_;       // by group: the last search that has found it
  int search_ = 0;
  std::vector<int> before_, after_, places_;  // of the current merge
};

}  // namespace torch_ort::passes
