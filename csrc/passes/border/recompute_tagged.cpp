// Obeys torch.utils.checkpoint: a value that a checkpoint computes and backward reads is recomputed
// in the backward half, just before the first node that reads any value of that checkpoint. Three
// kinds of values are saved for backward instead: the inputs of a checkpoint, the values that its
// policy saves, and the draws of random nodes. Of a dropout the mask is saved, and its result is
// multiplied again.

#include "ops/aten_names.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "ops/writer.h"
#include "passes/border/mover.h"
#include "passes/context.h"
#include "passes/halves.h"

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
  explicit Recomputation(Graph& graph) : graph_(graph) {
    for (Node& node : graph.nodes) {
      if (is_border(&node)) break;
      if (node.is_erased()) continue;
      order_[&node] = static_cast<int>(order_.size());
      if (asks_recompute(node)) tagged_.insert(&node);
    }
  }

  int run(PassContext& context) {
    if (tagged_.empty()) return 0;
    find_parts();
    int rewrites = 0;
    for (const auto& [checkpoint, part] : parts_) rewrites += rebuild(part, context);
    return rewrites;
  }

 private:
  // What is recomputed of one checkpoint: the nodes whose results backward reads, and the nodes
  // whose results these need in turn.
  struct Part {
    std::map<int, Node*> nodes;  // by position
    Node* first_reader = nullptr;
  };

  void find_parts() {
    for (Node* node : backward_half(graph_)) {
      for (const Value* value : node->inputs) {
        if (!is_rebuilt(value)) continue;
        need(value->producer);
        Part& part = parts_[value->producer->checkpoint];
        const bool is_needed = part.nodes.contains(order_.at(value->producer));
        if (is_needed && part.first_reader == nullptr) part.first_reader = node;
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
    const bool is_random = !ops::is_pure(*node);
    if (is_random && !dropout_ratio(*node)) return;
    if (!parts_[node->checkpoint].nodes.emplace(order_.at(node), node).second) return;
    for (const Value* value : node->inputs) {
      if (is_rebuilt(value) && value->producer->checkpoint == node->checkpoint)
        need(value->producer);
    }
  }

  int rebuild(const Part& part, PassContext& context) {
    Mover mover(graph_);
    int rewrites = 0;
    for (const auto& [order, node] : part.nodes) {
      if (!context.may_rewrite()) break;
      if (const auto ratio = dropout_ratio(*node)) {
        multiply_again(*node, *ratio, *part.first_reader, mover);
      } else {
        mover.copy(*node, *part.first_reader);
      }
      ++rewrites;
    }
    mover.redirect_backward_half();
    return rewrites;
  }

  void multiply_again(const Node& dropout, double ratio, Node& before, Mover& mover) {
    const ir::Attrs attrs = {
        {"operator", std::string(ops::aten::kDropoutBackward)},
        {"overload_name", std::string()},
        {"scale", 1.0 / (1.0 - ratio)},
        {"tensor_args", std::vector<std::string>{"grad_output", "mask"}},
    };
    Node& made = ops::Writer(graph_, &before)
                     .add_named(dropout.name + "_again", {ir::kAtenDomain, "ATen"},
                                {mover.current(dropout.inputs[0]), dropout.outputs[1]},
                                {dropout.outputs[0]->type}, attrs);
    made.origin = dropout.origin;
    made.recompute.clear();
    made.checkpoint = -1;
    mover.replace(*dropout.outputs[0], *made.outputs[0]);
  }

  Graph& graph_;
  std::unordered_set<const Node*> tagged_;
  std::unordered_map<const Node*, int> order_;  // in the forward half
  std::map<int, Part> parts_;                   // by checkpoint
};

}  // namespace

int recompute_tagged(Graph& graph, PassContext& context) {
  return Recomputation(graph).run(context);
}

}  // namespace torch_ort::passes
