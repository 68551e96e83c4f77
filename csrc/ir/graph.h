// The intermediate representation: values, nodes, and the graph that owns them.
// Reading order: dim.h, type.h, attr.h, graph.h, edit.h, verify.h.
// The IR is data. What runs it, and where its tensors live, is known to plan/ and run/ only.
#pragma once

#include "ir/attr.h"
#include "ir/type.h"

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::ir {

struct Node;
struct Graph;

// The `index` of a Use by a subgraph of the node: the subgraph refers to the value by its name.
inline constexpr int kCaptured = -1;

// One read of a value: the node, and which of its inputs the value is. Without a node the value is
// the graph output `index`.
struct Use {
  Node* node = nullptr;
  int index = 0;
  bool operator==(const Use&) const = default;
};

// One tensor of the program. It is the output of a node, a graph input or an initializer. A value
// of a subgraph may be none of these; it then refers to the outer value of the same name.
struct Value {
  std::string name;
  Type type;
  Node* producer = nullptr;
  // Its position among the outputs of the producer, the graph inputs or the initializers.
  int index = 0;
  std::vector<Use> uses;
  // The data of an initializer; nullptr where it is bound later, as for a parameter of the module.
  std::shared_ptr<const TensorData> data;
};

// The name of an op. The ops of standard ONNX have the empty domain.
struct OpId {
  std::string domain;
  std::string name;
  bool operator==(const OpId&) const = default;
  std::string str() const { return domain.empty() ? name : domain + "." + name; }
};

// One use of an op. Passes preserve `origin`, the line of user code that the node comes from.
struct Node {
  OpId op;
  std::string name;
  std::vector<Value*> inputs;   // nullptr: an optional input that is left out
  std::vector<Value*> outputs;  // nullptr: an output that nobody reads
  Attrs attrs;
  std::string origin;
  // The tags of `torch.utils.checkpoint`: the policy ("" if there is none, "must_save",
  // "prefer_save", "prefer_recompute" or "must_recompute") and the number of the checkpoint that
  // the node is in. -1: in none.
  std::string recompute;
  int checkpoint = -1;
  // If the node recomputes one of the forward half within a memory budget, the number of the
  // segment that this one is in (passes/border/plan.h); else -1. Only nodes of the same number are
  // fused, so that all other regions compute what they do without a budget.
  int segment = -1;
  // The number of the node of the captured graph that this one comes from, if a pass has numbered
  // the nodes (passes/border/clusters.h); else -1. Passes preserve it.
  int captured = -1;
  std::list<Node>::iterator position{};  // in Graph::nodes; edit.h maintains it

  bool is_erased() const { return op.name.empty(); }
};

// A graph owns its nodes and values. A pointer to one stays valid until sweep() frees it. `nodes`
// is in topological order. Erased nodes stay in the list until then, and loops skip them.
struct Graph {
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::string name = "graph";
  std::vector<Value*> inputs, outputs, initializers;
  std::list<Node> nodes;
  std::list<Value> values;
  std::unordered_set<std::string> names;  // of all values; edit.h maintains it
  // By name hint: the last suffix that was appended to make a name unique; edit.h maintains it.
  std::unordered_map<std::string, int> last_suffixes;
  // The version of the standard domain, if the graph was read from a file. 0: ops mean what the
  // newest opset says.
  int64_t opset = 0;
  // The symbols whose values the caller passes with each call, in that order. Other symbols are
  // bound from the shapes of the inputs. Unbacked ones are bound in the run, from the first tensor
  // whose shape has them.
  std::vector<std::string> symbol_inputs;
  // The values that the symbols had in the call that was captured. A pass may use them to estimate
  // what is faster, but never to decide what is correct.
  std::unordered_map<std::string, int64_t> size_hints;
};

inline bool is(const Node* node, std::string_view op, std::string_view domain = "") {
  return node != nullptr && node->op.name == op && node->op.domain == domain;
}

// The subgraphs of a node: the graphs among its attributes.
inline std::vector<std::shared_ptr<Graph>> bodies(const Node& node) {
  std::vector<std::shared_ptr<Graph>> found;
  for (const auto& [name, attr] : node.attrs) {
    if (auto* graph = std::get_if<std::shared_ptr<Graph>>(&attr)) found.push_back(*graph);
  }
  return found;
}

inline constexpr const char* kAtenDomain = "org.pytorch.aten";
inline constexpr const char* kMicrosoftDomain = "com.microsoft";
inline constexpr const char* kTorchOrtDomain = "torch_ort";

}  // namespace torch_ort::ir
