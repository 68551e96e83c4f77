#include "ir/verify.h"

#include "base/error.h"
#include "ir/edit.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace torch_ort::ir {

namespace {

// Checks one graph. A subgraph sees the names that its outer graphs have defined before its node.
class Verifier {
 public:
  Verifier(const Graph& graph, std::string_view stage, const Verifier* outer)
      : graph_(graph), stage_(stage), outer_(outer) {}

  void run() {
    check_names();
    check_list(graph_.inputs, "input");
    check_list(graph_.initializers, "initializer");
    define_captured();
    for (const Node& node : graph_.nodes) {
      if (node.is_erased()) {
        check(node.inputs.empty() && node.outputs.empty(), "an erased node still has edges");
      } else {
        check_node(node);
      }
    }
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      check_read(graph_.outputs[i], {nullptr, static_cast<int>(i)});
    }
    for (const Value& value : graph_.values) check_uses(value);
  }

 private:
  template <typename... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) [[unlikely]] {
      throw InternalError(concat("verify ", stage_, ": ", parts...));
    }
  }

  void check_names() {
    for (const Value& value : graph_.values) {
      owned_values_.insert(&value);
      check(!value.name.empty(), "a value of graph '", graph_.name, "' has no name");
      check(owned_.emplace(value.name, &value).second, "two values have the name '", value.name,
            "'");
      check(graph_.names.contains(value.name), "the name of value '", value.name,
            "' is not among the names of graph '", graph_.name, "'");
    }
    check(owned_.size() == graph_.names.size(), "graph '", graph_.name, "' has ",
          graph_.names.size(), " names, want those of its ", owned_.size(), " values");
  }

  // A value of another graph may have been destroyed, so only its address is compared.
  bool owns(const Value* value) const { return owned_values_.contains(value); }

  bool is_visible_outside(std::string_view name) const {
    for (const Verifier* outer = outer_; outer; outer = outer->outer_) {
      if (outer->defined_names_.contains(name)) return true;
    }
    return false;
  }

  void define(const Value& value) {
    check(!is_visible_outside(value.name), "value '", value.name,
          "' has the name of a value of an outer graph");
    defined_.insert(&value);
    defined_names_.insert(value.name);
  }

  void check_list(const std::vector<Value*>& list, const char* kind) {
    for (size_t i = 0; i < list.size(); ++i) {
      const Value* value = list[i];
      check(owns(value), kind, " ", i, " is no value of graph '", graph_.name, "'");
      check(!value->producer, kind, " '", value->name, "' has a producer");
      check(value->index == static_cast<int>(i), kind, " '", value->name, "' has index ",
            value->index, ", want ", i);
      check(!defined_.contains(value), kind, " '", value->name, "' stands twice in the lists");
      define(*value);
    }
  }

  void define_captured() {
    for (const Value& value : graph_.values) {
      if (!value.producer && !defined_.contains(&value) && is_visible_outside(value.name)) {
        defined_.insert(&value);
      }
    }
  }

  // A reader, as messages describe it. The text is made only for a message.
  struct Reader {
    Use use;
    const Graph& graph;
    friend std::ostream& operator<<(std::ostream& out, const Reader& reader) {
      if (reader.use.node) return out << "node '" << reader.use.node->name << "'";
      return out << "output " << reader.use.index << " of graph '" << reader.graph.name << "'";
    }
  };
  Reader reader(Use use) const { return {use, graph_}; }

  void check_read(const Value* value, Use use) {
    check(owns(value), reader(use), " reads a value that graph '", graph_.name, "' does not own");
    expected_uses_[value].push_back(use);
    if (defined_.contains(value)) return;
    check(value->producer, "value '", value->name, "' is used by ", reader(use),
          " but no node produces it");
    check(false, "value '", value->name, "' is used by ", reader(use),
          " but is not produced before it");
  }

  void check_node(const Node& node) {
    check(node.position != std::list<Node>::iterator() && &*node.position == &node, "node '",
          node.name, "' does not know its position");
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i])
        check_read(node.inputs[i], {const_cast<Node*>(&node), static_cast<int>(i)});
    }
    check_subgraphs(node);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i]) check_output(node, static_cast<int>(i));
    }
    if (is(&node, "YieldOp", kMicrosoftDomain)) {
      check(!yield_, "nodes '", yield_ ? yield_->name : "", "' and '", node.name,
            "' are both a YieldOp, want at most one");
      yield_ = &node;
    }
  }

  void check_output(const Node& node, int slot) {
    const Value* value = node.outputs[slot];
    check(owns(value), "output ", slot, " of node '", node.name, "' is no value of graph '",
          graph_.name, "'");
    check(value->producer == &node && value->index == slot, "value '", value->name,
          "' does not know that it is output ", slot, " of node '", node.name, "'");
    define(*value);
  }

  void check_subgraphs(const Node& node) {
    std::vector<std::string> captured;
    for (const auto& [name, attr] : node.attrs) {
      auto* subgraph = std::get_if<std::shared_ptr<Graph>>(&attr);
      if (!subgraph) continue;
      check(*subgraph != nullptr, "attribute '", name, "' of node '", node.name, "' has no graph");
      // A subgraph of the engine's own ops reads nothing from outside, and has names of its own.
      const bool is_closed = node.op.domain == kTorchOrtDomain;
      Verifier(**subgraph, stage_, is_closed ? nullptr : this).run();
      for (std::string& read : captured_names(**subgraph)) captured.push_back(std::move(read));
    }
    std::sort(captured.begin(), captured.end());
    captured.erase(std::unique(captured.begin(), captured.end()), captured.end());
    for (const std::string& name : captured) {
      auto found = owned_.find(name);
      check(found != owned_.end(), "a subgraph of node '", node.name, "' reads value '", name,
            "', which graph '", graph_.name, "' does not hold");
      check_read(found->second, {const_cast<Node*>(&node), kCaptured});
    }
  }

  void compare_uses(const Value& value, const std::vector<Use>& expected,
                    std::vector<Use> recorded) const {
    for (const Use& use : expected) {
      auto found = std::find(recorded.begin(), recorded.end(), use);
      check(found != recorded.end(), "value '", value.name, "' does not record its use by ",
            reader(use));
      std::swap(*found, recorded.back());
      recorded.pop_back();
    }
    check(recorded.empty(), "value '", value.name, "' records ", recorded.size(),
          " uses that no node and no output has");
  }

  // Checks that the recorded uses of a value are those that were found, each once, in any order.
  void check_uses(const Value& value) {
    const std::vector<Use>& expected = expected_uses_[&value];
    if (value.uses != expected) compare_uses(value, expected, value.uses);
    check(!value.producer || defined_.contains(&value), "value '", value.name,
          "' has a producer that is not in the graph");
  }

  const Graph& graph_;
  std::string_view stage_;
  const Verifier* outer_;
  const Node* yield_ = nullptr;
  std::unordered_map<std::string_view, const Value*> owned_;  // by name
  std::unordered_set<const Value*> owned_values_;
  std::unordered_set<const Value*> defined_;
  std::unordered_set<std::string_view> defined_names_;
  std::unordered_map<const Value*, std::vector<Use>> expected_uses_;
};

}  // namespace

void verify(const Graph& graph, std::string_view stage) { Verifier(graph, stage, nullptr).run(); }

}  // namespace torch_ort::ir
