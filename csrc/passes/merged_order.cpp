#include "passes/merged_order.h"

#include <algorithm>
#include <numeric>

namespace torch_ort::passes {

MergedOrder::MergedOrder(int num_nodes, const std::vector<Arc>& arcs)
    : successors_(neighbors(num_nodes, arcs, &Arc::from, &Arc::to)),
      predecessors_(neighbors(num_nodes, arcs, &Arc::to, &Arc::from)),
      group_of_(num_nodes),
      search_of_(num_nodes, 0) {
  std::iota(group_of_.begin(), group_of_.end(), 0);
  next_member_ = place_ = group_of_;
}

MergedOrder::Lists MergedOrder::neighbors(int num_nodes, const std::vector<Arc>& arcs,
                                          int Arc::* node, int Arc::* neighbor) {
  Lists lists{std::vector<int>(num_nodes + 1, 0), std::vector<int>(arcs.size())};
  for (const Arc& arc : arcs) ++lists.starts[arc.*node + 1];
  std::partial_sum(lists.starts.begin(), lists.starts.end(), lists.starts.begin());
  std::vector<int> ends = lists.starts;
  for (const Arc& arc : arcs) lists.items[ends[arc.*node]++] = arc.*neighbor;
  return lists;
}

bool MergedOrder::merge(int a, int b) {
  int first = group_of_[a], last = group_of_[b];
  if (first == last) return true;
  // Paths only lead from the earlier group to the later one.
  if (place_[first] > place_[last]) std::swap(first, last);
  if (!collect(first, last, successors_, after_)) return false;
  collect(last, first, predecessors_, before_);
  move(first, last);
  join(first, last);
  return true;
}

bool MergedOrder::has_path(int from, int to, int without) {
  const int first = group_of_[from], last = group_of_[to];
  if (place_[first] > place_[last]) return false;
  return !collect(first, last, successors_, after_, group_of_[without]);
}

bool MergedOrder::collect(int from, int to, const Lists& neighbors, std::vector<int>& found,
                          int without) {
  const int low = std::min(place_[from], place_[to]), high = std::max(place_[from], place_[to]);
  ++search_;
  found.clear();
  if (without != kNone) search_of_[without] = search_;
  bool meets = false;
  const auto look_from = [&](int group) {
    int member = group;  // A group has the number of one of its nodes.
    do {
      for (int i = neighbors.starts[member]; i < neighbors.starts[member + 1]; ++i) {
        const int next = group_of_[neighbors.items[i]];
        meets = meets || (next == to && group != from);
        const bool is_between = place_[next] > low && place_[next] < high;
        if (!is_between || search_of_[next] == search_) continue;
        search_of_[next] = search_;
        found.push_back(next);
      }
      member = next_member_[member];
    } while (member != group);
  };
  look_from(from);
  for (size_t i = 0; i < found.size() && !meets; ++i) look_from(found[i]);
  return !meets;
}

void MergedOrder::move(int kept, int gone) {
  places_ = {place_[kept], place_[gone]};
  for (const std::vector<int>* groups : {&before_, &after_}) {
    for (int group : *groups) places_.push_back(place_[group]);
  }
  std::sort(places_.begin(), places_.end());
  sort(before_);
  sort(after_);
  auto place = places_.begin();
  for (int group : before_) place_[group] = *place++;
  place_[kept] = *place++;
  ++place;  // The place of the group that is gone stays empty.
  for (int group : after_) place_[group] = *place++;
}

void MergedOrder::sort(std::vector<int>& groups) const {
  std::sort(groups.begin(), groups.end(), [this](int a, int b) { return place_[a] < place_[b]; });
}

void MergedOrder::join(int kept, int gone) {
  int member = gone;
  do {
    group_of_[member] = kept;
    member = next_member_[member];
  } while (member != gone);
  std::swap(next_member_[kept], next_member_[gone]);
}

}  // namespace torch_ort::passes
