// Obeys torch.utils.checkpoint: a value that a checkpoint computes and backward reads is recomputed
// in the backward half, just before the first node that reads any value of that checkpoint. Three
// kinds of values are saved for backward instead: the inputs of a checkpoint, the values that its
// policy saves, and the draws of random nodes. Of a dropout the mask is saved, and its result is
// multiplied again.

#include "ir/edit.h"
#include "ops/aten_names.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/context.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::passes {

namespace {

using ir::Graph;
using ir::Node;
using ir::Value;

bool asks_recompute(const Node& node) {
  return node.recompute == "must_recompute" || node.recompute == "prefer_recompute";
}

// The ratio of a dropout that is in training and whose ratio is a constant.
std::optional<double> dropout_ratio(const Node& node) {
  if (!ir::is(&node, "Dropout") || node.inputs.size() < 2 || node.outputs.size() < 2) return {};
  if (node.outputs[1] == nullptr) return {};
  const auto number = ops::known_number(node.inputs[1]);
  const double* ratio = number ? std::get_if<double>(&number->value) : nullptr;
  if (ratio == nullptr || *ratio <= 0.0 || *ratio >= 1.0) return {};
  return *ratio;
}

class Recomputation {
 public:
  explicit Recomputation(Graph& graph) : graph_(graph) {}

  int run(PassContext& context) {
    if (!find_halves()) return 0;
    find_needed();
    int rewrites = 0;
    for (auto& [checkpoint, nodes] : needed_) rewrites += rebuild(nodes, context);
    return rewrites;
  }

 private:
  bool find_halves() {
    bool is_backward = false;
    for (Node& node : graph_.nodes) {
      if (node.is_erased()) continue;
      if (is_backward) {
        backward_.push_back(&node);
      } else if (ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) {
        is_backward = true;
      } else {
        order_[&node] = static_cast<int>(order_.size());
        if (asks_recompute(node)) tagged_.insert(&node);
      }
    }
    return !tagged_.empty() && !backward_.empty();
  }

  // The nodes to run again, by checkpoint: those whose results backward reads, and the nodes whose
  // results these need in turn.
  void find_needed() {
    for (const Node* node : backward_) {
      for (const Value* value : node->inputs) {
        if (is_rebuilt(value)) need(value->producer);
      }
    }
  }

  // Whether a tagged node produces the value and backward recomputes it instead of reading the
  // saved one.
  bool is_rebuilt(const Value* value) const {
    if (value == nullptr || !tagged_.contains(value->producer)) return false;
    const Node& maker = *value->producer;
    if (dropout_ratio(maker) && value == maker.outputs[1]) return false;
    return std::none_of(value->uses.begin(), value->uses.end(), [&](const ir::Use& use) {
      return tagged_.contains(use.node) && use.node->checkpoint != maker.checkpoint;
    });
  }

  void need(Node* node) {
    const bool random = !ops::is_pure(*node);
    if (random && !dropout_ratio(*node)) return;
    if (!needed_[node->checkpoint].emplace(order_.at(node), node).second) return;
    for (const Value* value : node->inputs) {
      if (is_rebuilt(value) && value->producer->checkpoint == node->checkpoint)
        need(value->producer);
    }
  }

  int rebuild(const std::map<int, Node*>& nodes, PassContext& context) {
    Node* first_reader = nullptr;
    for (Node* node : backward_) {
      for (const Value* value : node->inputs) {
        if (first_reader != nullptr || !is_rebuilt(value)) continue;
        if (nodes.contains(order_.at(value->producer))) first_reader = node;
      }
    }
    if (first_reader == nullptr) return 0;
    int rewrites = 0;
    std::unordered_map<const Value*, Value*> again;
    for (const auto& [order, node] : nodes) {
      if (!context.may_rewrite()) break;
      rebuild(*node, *first_reader, again);
      ++rewrites;
    }
    for (Node* node : backward_) {
      for (size_t i = 0; i < node->inputs.size(); ++i) {
        auto found = again.find(node->inputs[i]);
        if (found != again.end()) ir::set_input(*node, static_cast<int>(i), found->second);
      }
    }
    return rewrites;
  }

  void rebuild(const Node& node, Node& before, std::unordered_map<const Value*, Value*>& again) {
    const auto current = [&](Value* value) {
      auto found = again.find(value);
      return found == again.end() ? value : found->second;
    };
    ops::Writer write(graph_, &before);
    if (const auto ratio = dropout_ratio(node)) {
      const ir::Attrs attrs = {
          {"operator", std::string(ops::aten::kDropoutBackward)},
          {"overload_name", std::string()},
          {"scale", 1.0 / (1.0 - *ratio)},
          {"tensor_args", std::vector<std::string>{"grad_output", "mask"}},
      };
      Node& made = write.add_named(node.name + "_again", {ir::kAtenDomain, "ATen"},
                                   {current(node.inputs[0]), node.outputs[1]},
                                   {node.outputs[0]->type}, attrs);
      made.origin = node.origin;
      made.recompute.clear();
      made.checkpoint = -1;
      again[node.outputs[0]] = made.outputs[0];
    } else {
      std::vector<Value*> inputs;
      for (Value* value : node.inputs)
        inputs.push_back(value == nullptr ? nullptr : current(value));
      const Node& copy = write.again(node, std::move(inputs));
      for (size_t i = 0; i < node.outputs.size(); ++i) {
        if (node.outputs[i] != nullptr) again[node.outputs[i]] = copy.outputs[i];
      }
    }
  }

  Graph& graph_;
  std::vector<Node*> backward_;
  std::unordered_set<const Node*> tagged_;
  std::unordered_map<const Node*, int> order_;  // in the forward half
  std::map<int, std::map<int, Node*>> needed_;  // by checkpoint and position
};

}  // namespace

int recompute_tagged(Graph& graph, PassContext& context) {
  return Recomputation(graph).run(context);
}

}  // namespace torch_ort::passes
