// Keeps the memory of a training step within a budget, or recomputes what a Selection names, if
// either is set (passes/budget.h). The nodes that recompute_plan.h chooses are added to the
// backward half just before their results are read. Products, attention and PyTorch's operators run
// again unchanged, and so compute the same bits; random draws depend on positions, and are repeated
// as well. Nodes of regions are copied, and fuse_regions fuses the copies.

#include "ir/edit.h"
#include "ops/fusion.h"
#include "ops/op.h"
#include "ops/writer.h"
#include "passes/budget.h"
#include "passes/context.h"
#include "passes/halves.h"
#include "passes/memory.h"
#include "passes/recompute_plan.h"
#include "passes/region_groups.h"

#include <algorithm>
#include <unordered_map>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

class Recomputation {
 public:
  explicit Recomputation(Graph& graph) : graph_(graph), backward_(backward_nodes(graph)) {}

  int run(const std::vector<Again>& plan, PassContext& context) {
    std::vector<const Again*> written;
    for (const Again& again : plan) {
      if (!context.may_rewrite()) break;
      write(again);
      written.push_back(&again);
    }
    read_again();
    share_with_rebuilt();
    for (auto made = copies_.rbegin(); made != copies_.rend(); ++made) erase_unread(**made);
    for (auto again = written.rbegin(); again != written.rend(); ++again) {
      erase_unread(*(*again)->node);
    }
    return static_cast<int>(written.size());
  }

 private:
  void write(const Again& again) {
    const Node& node = *again.node;
    std::vector<Value*> inputs = node.inputs;
    for (Value*& input : inputs) {
      if (const auto found = made_.find(input); found != made_.end()) input = found->second;
    }
    Node& copy = ops::Writer(graph_, again.before).again(node, std::move(inputs));
    copy.checkpoint = kNoCheckpoint - 1 - again.segment;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] != nullptr) made_[node.outputs[i]] = copy.outputs[i];
    }
    copies_.push_back(&copy);
  }

  void read_again() {
    for (const auto& [value, again] : made_) {
      const std::vector<ir::Use> uses = value->uses;
      for (const ir::Use& use : uses) {
        if (use.node != nullptr && use.index >= 0 && backward_.contains(use.node)) {
          ir::set_input(*use.node, use.index, again);
        }
      }
    }
  }

  // rebuild_values may have let a region write an operand of a product once more. If this pass
  // recomputes the same value for another product, and earlier, both products read that copy.
  void share_with_rebuilt() {
    std::unordered_map<const Node*, int> order;
    for (const Node& node : graph_.nodes) order.emplace(&node, static_cast<int>(order.size()));
    std::unordered_map<const Value*, Value*> same;  // a copy of this pass -> the equal value
    for (Node* copy : copies_) {
      if (ops::fused_form(*copy).kind == ops::FusedForm::Kind::kNone) continue;
      Node* twin = find_twin(*copy, same);
      if (twin == nullptr) continue;
      Value *old = twin->outputs[0], *again = copy->outputs[0];
      same[again] = old;
      const std::vector<ir::Use> uses = old->uses;
      for (const ir::Use& use : uses) {
        if (use.node == nullptr || use.index < 0 || order.at(use.node) < order.at(copy)) continue;
        if (!reads_memory(*use.node)) continue;
        ir::set_input(*use.node, use.index, again);
      }
      erased_later_.push_back(twin);
    }
    for (auto twin = erased_later_.rbegin(); twin != erased_later_.rend(); ++twin) {
      erase_unread(**twin);
    }
  }

  // Another node of the backward half that computes the same from the same inputs.
  Node* find_twin(const Node& copy, const std::unordered_map<const Value*, Value*>& same) const {
    if (copy.inputs.empty() || copy.outputs.size() != 1) return nullptr;
    const auto stands_for = [&](Value* value) {
      const auto found = same.find(value);
      return found == same.end() ? value : found->second;
    };
    for (Value* input : copy.inputs) {
      if (input == nullptr || (input->producer == nullptr && input->data != nullptr)) continue;
      for (Value* read : {stands_for(input), input}) {
        for (const ir::Use& use : read->uses) {
          if (use.node == nullptr || use.node == &copy || use.index < 0) continue;
          if (!backward_.contains(use.node) || use.node->op != copy.op) continue;
          if (use.node->outputs.size() != 1 || use.node->inputs.size() != copy.inputs.size()) {
            continue;
          }
          if (!(use.node->attrs == copy.attrs)) continue;
          const auto is_same = [&](Value* a, Value* b) {
            return a == b || (b != nullptr && stands_for(b) == a);
          };
          if (std::equal(use.node->inputs.begin(), use.node->inputs.end(), copy.inputs.begin(),
                         is_same)) {
            return use.node;
          }
        }
      }
      // A twin would read this input too, and none of its readers is one.
      return nullptr;
    }
    return nullptr;
  }

  // Whether the node reads its input from memory: it is not in a region, and no region reads views
  // of it.
  static bool reads_memory(const Node& node) {
    if (ops::fused_form(node).kind == ops::FusedForm::Kind::kNone) return true;
    if (!ops::is_view(node) || node.outputs.size() != 1) return false;
    const auto& uses = node.outputs[0]->uses;
    return std::all_of(uses.begin(), uses.end(), [](const ir::Use& use) {
      return use.node != nullptr && use.index >= 0 && reads_memory(*use.node);
    });
  }

  void erase_unread(Node& node) {
    if (node.is_erased()) return;
    const bool is_read = std::any_of(node.outputs.begin(), node.outputs.end(), [](const Value* v) {
      return v != nullptr && !v->uses.empty();
    });
    if (!is_read) ir::erase(graph_, node);
  }

  Graph& graph_;
  const std::unordered_set<const Node*> backward_;
  std::unordered_map<const Value*, Value*> made_;  // by the value of the forward half
  std::vector<Node*> copies_, erased_later_;
};

// Views, and nodes of the backward half that depend on no gradient, are at its beginning. Each
// moves to its first reader, since memory for its result, and for what it reads, is not needed
// before.
class Sinker {
 public:
  explicit Sinker(Graph& graph) : graph_(graph) {
    const SharedMemory memory(graph);
    for (Node& node : graph.nodes) {
      if (node.is_erased()) continue;
      is_backward_ ? void(nodes_.push_back(&node)) : order_.push_back(&node);
      if (is_backward_ && may_wait(node, memory)) waiting_.insert(&node);
      if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) is_backward_ = true;
      note_gradients(node);
    }
  }

  void run() {
    for (Node* node : nodes_) {
      if (!waiting_.contains(node)) write(node);
    }
    for (Node* node : nodes_) {
      // Nobody reads it, or it is an output.
      if (waiting_.contains(node)) write(node);
    }
    ir::reorder(graph_, order_);
  }

 private:
  bool may_wait(const Node& node, const SharedMemory& memory) const {
    if (!ops::is_pure(node) || !ir::bodies(node).empty()) return false;
    if (!ops::is_view(node) && reads_gradients(node)) return false;
    return std::all_of(node.outputs.begin(), node.outputs.end(), [&](const Value* output) {
      if (output == nullptr) return true;
      const auto is_plain = [](const ir::Use& use) { return use.index >= 0; };
      return !memory.is_written(output) &&
             std::all_of(output->uses.begin(), output->uses.end(), is_plain);
    });
  }

  bool reads_gradients(const Node& node) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(),
                       [this](const Value* input) { return gradients_.contains(input); });
  }

  // Notes which values depend on the gradients that enter at the border.
  void note_gradients(const Node& node) {
    if (!is_backward_) return;
    if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain) || reads_gradients(node)) {
      gradients_.insert(node.outputs.begin(), node.outputs.end());
    }
  }

  void write(Node* node) {
    waiting_.erase(node);
    for (const Value* input : node->inputs) {
      if (input != nullptr && waiting_.contains(input->producer)) write(input->producer);
    }
    order_.push_back(node);
  }

  Graph& graph_;
  bool is_backward_ = false;
  // The nodes of the backward half, and all nodes in their new order.
  std::vector<Node*> nodes_, order_;
  std::unordered_set<const Node*> waiting_;
  std::unordered_set<const Value*> gradients_;
};

}  // namespace

int recompute_to_budget(Graph& graph, PassContext& context) {
  const bool is_asked = context.budget != nullptr || context.selection != nullptr;
  if (!is_asked || backward_nodes(graph).empty()) return 0;
  Sinker(graph).run();
  const RecomputePlan plan = context.budget != nullptr
                                 ? plan_recompute(graph, *context.budget)
                                 : plan_recompute(graph, *context.selection, *context.clusters);
  if (context.budget_report != nullptr) *context.budget_report = plan.report;
  return Recomputation(graph).run(plan.again, context);
}

}  // namespace torch_ort::passes
