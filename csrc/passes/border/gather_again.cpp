// wait(all_gather(x)) in the forward half, which backward reads
//   -> a second one in the backward half, just before its first reader
//
// if torch.utils.checkpoint asks for it and x can be had again: it is an input of the graph, as the
// shard of a parameter is, or a view or cast of one, or backward reads it anyway. Then the gathered
// tensor, which is as many times as large as there are ranks, is not held between the halves. No
// other collective is repeated: the result of a sum over ranks is no larger than its operand.
// Gathers that nobody marks are repeated by recompute_to_budget.cpp.

#include "ir/edit.h"
#include "ops/collective.h"
#include "ops/op.h"
#include "passes/border/mover.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"

#include <algorithm>
#include <unordered_map>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

class Gathering {
 public:
  explicit Gathering(Graph& graph) : graph_(graph), memory_(graph) {
    for (Node* node : backward_half(graph)) places_[node] = static_cast<int>(places_.size());
  }

  bool repeat(Node& wait, PassContext& context) {
    const Node* start = ops::collective_of(wait);
    if (start == nullptr || !ops::is_gather(*start)) return false;
    if (!asks_recompute(*start) || memory_.leaves(wait.outputs[0])) return false;
    views_.clear();
    first_ = nullptr;
    find_readers(*wait.outputs[0]);
    std::vector<Node*> nodes;  // from the wait back to what is at hand
    if (first_ == nullptr || !find_makers(start->inputs[0], nodes)) return false;
    if (!context.may_rewrite()) return false;

    Mover mover(graph_);
    for (auto maker = nodes.rbegin(); maker != nodes.rend(); ++maker) mover.copy(**maker, *first_);
    mover.copy(*start, *first_);
    mover.copy(wait, *first_);
    mover.redirect_backward_half();
    std::sort(views_.begin(), views_.end(),
              [this](Node* a, Node* b) { return places_.at(a) < places_.at(b); });
    for (Node* view : views_) ir::move_before(graph_, *view, *first_);
    return true;
  }

 private:
  // The views of a value in the backward half, and the first node there that reads it or one of
  // them.
  void find_readers(const Value& value) {
    for (const ir::Use& use : value.uses) {
      if (use.node == nullptr || !places_.contains(use.node)) continue;
      if (ops::is_view(*use.node) && use.index == 0 && use.node->outputs.size() == 1) {
        if (std::find(views_.begin(), views_.end(), use.node) != views_.end()) continue;
        views_.push_back(use.node);
        find_readers(*use.node->outputs[0]);
      } else if (first_ == nullptr || places_.at(use.node) < places_.at(first_)) {
        first_ = use.node;
      }
    }
  }

  // The views and casts of the forward half that make a value of what backward can read.
  bool find_makers(Value* value, std::vector<Node*>& nodes) const {
    while (value->producer != nullptr && !is_read_by_backward(*value)) {
      Node* maker = value->producer;
      const bool is_simple = ops::is_view(*maker) || ir::is(maker, "Cast");
      if (!is_simple || maker->outputs.size() != 1) return false;
      if (std::any_of(maker->inputs.begin() + 1, maker->inputs.end(), [](const Value* other) {
            return other != nullptr && other->producer != nullptr && ops::is_read_as_tensor(*other);
          }))
        return false;
      nodes.push_back(maker);
      value = maker->inputs[0];
    }
    return !memory_.is_written(value);
  }

  bool is_read_by_backward(const Value& value) const {
    return std::any_of(value.uses.begin(), value.uses.end(), [this](const ir::Use& use) {
      return use.node != nullptr && places_.contains(use.node);
    });
  }

  Graph& graph_;
  const SharedMemory memory_;
  std::unordered_map<const Node*, int> places_;  // in the backward half
  std::vector<Node*> views_;
  Node* first_ = nullptr;
};

}  // namespace

int gather_again(Graph& graph, PassContext& context) {
  if (!ops::has_collectives(graph) || backward_nodes(graph).empty()) return 0;
  std::vector<Node*> waits;  // of the forward half
  for (Node& node : graph.nodes) {
    if (is_border(&node)) break;
    if (!node.is_erased() && ops::is_wait(node)) waits.push_back(&node);
  }
  Gathering gathering(graph);
  return static_cast<int>(std::count_if(
      waits.begin(), waits.end(), [&](Node* wait) { return gathering.repeat(*wait, context); }));
}

}  // namespace torch_ort::passes
