// start, wait, work  -> start, work, wait
// work, start, wait  -> start, work, wait
//
// Communication between ranks runs beside other work if there is some between the node that starts
// it and the one that waits for it. A captured graph has both next to each other. So a wait is
// moved behind later nodes that do not need it, and what does not lead to a start is moved behind
// that, until the work between both takes as long as the communication, or there is no more. More
// would only hold its operands and results for longer: parameters of all layers would be gathered
// before the first one.
//
// Starts stay in the order in which they were captured, which is that of all ranks, and nothing
// crosses the border. Work hides one collective only.

#include "ir/edit.h"
#include "ops/collective.h"
#include "ops/control_flow.h"
#include "ops/op.h"
#include "passes/border/costs.h"
#include "passes/context.h"
#include "passes/data_sizes.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <algorithm>
#include <unordered_map>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

constexpr int kMostRounds = 16;
// How many nodes are looked at on each side.
constexpr int kWindow = 500;

class Overlap {
 public:
  Overlap(Graph& graph, const Communication& communication)
      : graph_(graph), memory_(graph), costs_(graph, speeds_of_ranks(graph, communication)) {
    for (Node& node : graph.nodes) {
      if (node.is_erased()) continue;
      positions_[&node] = static_cast<int>(nodes_.size());
      if (is_border(&node)) border_ = static_cast<int>(nodes_.size());
      nodes_.push_back(&node);
    }
    needs_.resize(nodes_.size());
    is_claimed_.assign(nodes_.size(), false);
    find_needs();
  }

  int run(PassContext& context) {
    const int count = static_cast<int>(nodes_.size());
    const int end = border_ < 0 ? count : border_;
    int rewrites = settle(0, end, context);
    if (border_ >= 0) rewrites += settle(border_ + 1, count, context);
    if (rewrites > 0) {
      std::vector<Node*> order(nodes_.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = nodes_[order_[i]];
      ir::reorder(graph_, order);
    }
    return rewrites;
  }

 private:
  void find_needs() {
    order_.resize(nodes_.size());
    places_.resize(nodes_.size());
    marks_.assign(nodes_.size(), 0);
    int last_effect = -1;
    std::unordered_map<const Value*, std::vector<int>> readers;  // by root of written memory
    std::unordered_map<const Value*, int> last_writer;
    for (int at = 0; at < static_cast<int>(nodes_.size()); ++at) {
      order_[at] = places_[at] = at;
      const Node& node = *nodes_[at];
      const Node* start = ops::collective_of(node);
      const bool is_effect = start == nullptr && !ops::is_pure(node);
      if (is_effect) {
        need(at, last_effect);
        last_effect = at;
      }
      // A collective reads its operands until the wait.
      for (const auto* list : {&node.inputs, start == nullptr ? nullptr : &start->inputs}) {
        if (list == nullptr) continue;
        for (const Value* value : *list) {
          if (value == nullptr) continue;
          if (value->producer != nullptr) need(at, positions_.at(value->producer));
          if (start == nullptr) need_waits(at, *value);
          if (!memory_.is_written(value)) continue;
          const Value* root = SharedMemory::root(value);
          if (const auto writer = last_writer.find(root); writer != last_writer.end())
            need(at, writer->second);
          if (is_effect) {
            for (const int reader : readers[root]) need(at, reader);
            last_writer[root] = at;
          }
          readers[root].push_back(at);
        }
      }
    }
  }

  // What reads a result of a collective itself, after a wait for it, stays behind that.
  void need_waits(int node, const Value& value) {
    if (value.producer == nullptr || !ops::is_collective(*value.producer)) return;
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || !ops::is_wait(*use.node)) continue;
      if (const int wait = positions_.at(use.node); wait < node) need(node, wait);
    }
  }

  void need(int node, int other) {
    if (other >= 0 && other != node) needs_[node].push_back(other);
  }

  bool needs_marked(int node) const {
    return std::any_of(needs_[node].begin(), needs_[node].end(),
                       [this](int other) { return marks_[other] == mark_; });
  }

  // What hides one collective may have stood between another one and its wait, which then finds
  // other work. Few rounds settle that.
  int settle(int begin, int end, PassContext& context) {
    int rewrites = 0;
    for (int round = 0, more = 1; more > 0 && round < kMostRounds; ++round) {
      is_claimed_.assign(nodes_.size(), false);
      more = arrange(begin, end, context);
      rewrites += more;
    }
    return rewrites;
  }

  // Arranges the nodes from `begin` to `end`, which are a half.
  int arrange(int begin, int end, PassContext& context) {
    std::vector<int> starts;
    for (int at = begin; at < end; ++at) {
      if (ops::is_collective(*nodes_[order_[at]])) starts.push_back(order_[at]);
    }
    int rewrites = 0;
    for (const int start : starts) {
      const double micros = costs_.to_communicate(*nodes_[start]);
      const int wait = first_wait(start, begin, end);
      if (wait < 0) continue;
      if (work_between(start, wait) < micros && context.may_rewrite()) {
        const bool waits_later = wait_later(start, wait, micros, end);
        const bool starts_earlier = start_earlier(start, wait, micros, begin);
        if (waits_later || starts_earlier)
          ++rewrites;
        else
          context.did_not_rewrite();
      }
      claim_between(start, wait, micros);
    }
    return rewrites;
  }

  int place(int node) const { return places_[node]; }

  // Puts nodes into the order, from a place on.
  void put(int from, const std::vector<int>& nodes) {
    for (const int node : nodes) {
      places_[node] = from;
      order_[from++] = node;
    }
  }

  // The first node that waits for a collective of the same half; -1 if none does.
  int first_wait(int start, int begin, int end) const {
    int first = -1;
    for (const Value* result : nodes_[start]->outputs) {
      if (result == nullptr) continue;
      for (const ir::Use& use : result->uses) {
        if (use.node == nullptr || !ops::is_wait(*use.node)) return -1;
        const int at = positions_.at(use.node);
        if (at < begin || at >= end) continue;
        if (first < 0 || place(at) < place(first)) first = at;
      }
    }
    return first;
  }

  bool is_ours(int node) const {
    return ops::is_collective(*nodes_[node]) || ops::is_wait(*nodes_[node]);
  }

  double work_of(int node) const {
    return is_ours(node) || is_claimed_[node] ? 0 : costs_.to_run(*nodes_[node]);
  }

  double work_between(int start, int wait) const {
    double work = 0;
    for (int i = place(start) + 1; i < place(wait); ++i) work += work_of(order_[i]);
    return work;
  }

  void claim_between(int start, int wait, double micros) {
    double work = 0;
    for (int i = place(start) + 1; i < place(wait) && work < micros; ++i) {
      work += work_of(order_[i]);
      is_claimed_[order_[i]] = true;
    }
  }

  // Moves nodes that do not need the wait in front of it.
  bool wait_later(int start, int wait, double micros, int end) {
    double work = work_between(start, wait);
    std::vector<int> moved, staying = {wait};
    marks_[wait] = ++mark_;  // of what stays
    const int first = place(wait), most = std::min(end, first + kWindow);
    for (int at = first + 1; at < most && work < micros; ++at) {
      const int node = order_[at];
      if (is_ours(node) || is_claimed_[node] || needs_marked(node)) {
        marks_[node] = mark_;
        staying.push_back(node);
      } else {
        moved.push_back(node);
        work += work_of(node);
      }
    }
    if (moved.empty()) return false;
    put(first, moved);
    put(first + static_cast<int>(moved.size()), staying);
    return true;
  }

  // Moves nodes that the start does not need behind it.
  bool start_earlier(int start, int wait, double micros, int begin) {
    double work = work_between(start, wait);
    // Both from the last one to the first one.
    std::vector<int> moved, leading = {start};
    ++mark_;  // of what leads to the start
    for (const int other : needs_[start]) marks_[other] = mark_;
    const int last = place(start), least = std::max(begin, last - kWindow);
    int first = last;
    for (; first > least && work < micros; --first) {
      const int node = order_[first - 1];
      if (marks_[node] == mark_ || is_claimed_[node]) {
        leading.push_back(node);
        for (const int other : needs_[node]) marks_[other] = mark_;
      } else {
        moved.push_back(node);
        work += work_of(node);
      }
    }
    // Other waits alone are no work.
    if (std::all_of(moved.begin(), moved.end(), [this](int node) { return is_ours(node); }))
      return false;
    std::reverse(leading.begin(), leading.end());
    std::reverse(moved.begin(), moved.end());
    put(first, leading);
    put(first + static_cast<int>(leading.size()), moved);
    return true;
  }

  Graph& graph_;
  const SharedMemory memory_;
  const Costs costs_;
  std::vector<Node*> nodes_;
  std::unordered_map<const Node*, int> positions_;
  int border_ = -1;
  std::vector<std::vector<int>> needs_;  // by node: those that must come before
  std::vector<int> order_;               // of the nodes, by their positions before
  std::vector<int> places_;              // by node: its place in the order
  std::vector<int> marks_;               // by node: the last search that has marked it
  int mark_ = 0;
  std::vector<bool> is_claimed_;  // by node: it hides a collective
};

}  // namespace

int overlap_collectives(Graph& graph, PassContext& context) {
  // A size that data tells is known after the node that binds it, of which its readers say nothing.
  if (!ops::has_collectives(graph) || DataSizes(graph).are_there()) return 0;
  return Overlap(graph, context.communication).run(context);
}

}  // namespace torch_ort::passes
