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

// The slot of a use by a subgraph of the node: the subgraph refers to the value by its name.
inline constexpr int kCaptured = -1;

// A node that reads a value, and the slot it reads it in. No node: the value is a graph output.
struct Use {
  Node* node = nullptr;
  int index = 0;
  bool operator==(const Use&) const = default;
};

// One tensor of the program. It has a producer, or it is a graph input or an initializer.
// In a subgraph it may be none of these: then it stands for the outer value of the same name.
struct Value {
  std::string name;
  Type type;
  Node* producer = nullptr;
  int index = 0;  // which output of the producer, input or initializer it is
  std::vector<Use> uses;
  // The data of an initializer. Missing where it is bound later (a parameter of the module).
  std::shared_ptr<const TensorData> data;
};

// What an op is called. Standard ONNX ops have the empty domain.
struct OpId {
  std::string domain;
  std::string name;
  bool operator==(const OpId&) const = default;
  std::string str() const { return domain.empty() ? name : domain + "." + name; }
};

// One operation. `origin` is the line of user code that it came from; passes keep it.
struct Node {
  OpId op;
  std::string name;
  std::vector<Value*> inputs;   // nullptr: an optional input that is left out
  std::vector<Value*> outputs;  // nullptr: an output that nobody reads
  Attrs attrs;
  std::string origin;
  // How `torch.utils.checkpoint` tagged the node: "", "must_save", "prefer_save",
  // "prefer_recompute", "must_recompute"; and the number of its checkpointed region.
  std::string recompute;
  int checkpoint = -1;
  // Which node of the captured graph it comes from, where a pass has numbered them; passes keep it.
  int captured = -1;
  std::list<Node>::iterator position{};  // in the graph; edit.h keeps it

  bool is_erased() const { return op.name.empty(); }
};

// Owns its nodes and values; every pointer in it stays valid until its owner sweeps the graph.
// `nodes` is in topological order; erased nodes are tombstones that a plain loop may pass over.
struct Graph {
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::string name = "graph";
  std::vector<Value*> inputs, outputs, initializers;
  std::list<Node> nodes;
  std::list<Value> values;
  std::unordered_set<std::string> names;               // of all values; edit.h keeps it
  std::unordered_map<std::string, int> last_suffixes;  // given to a name hint; edit.h keeps it
  // Of the standard domain in the file that the graph was read from. 0: ops mean what they mean
  // in the newest opset.
  int64_t opset = 0;
  // Symbols whose value is given with each call, in the order in which they are given.
  // Other symbols are bound from the shapes of the inputs, or by the data of the first tensor sized
  // by them.
  std::vector<std::string> symbol_inputs;
  // Values of symbols in the call that the graph was captured from. A pass may weigh by them what
  // is faster; what is right it may not know from them.
  std::unordered_map<std::string, int64_t> size_hints;
};

inline bool is(const Node* node, std::string_view op, std::string_view domain = "") {
  return node != nullptr && node->op.name == op && node->op.domain == domain;
}

// The graphs among the attributes of a node.
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
