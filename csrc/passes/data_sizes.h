// Which nodes give the sizes that only data decides.
#pragma once

#include "ir/graph.h"

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes {

// A symbol that no input of the graph determines gets its value from a node: from the first one
// whose result has it as a size (`x[mask]`), or which gives it as a number (`int(x.sum())`). Nodes
// that mention the symbol must stay behind that node, whether or not they read one of its results:
// an expand to the length of `x[mask]` reads neither x nor mask.
class DataSizes {
 public:
  explicit DataSizes(const ir::Graph& graph);

  bool are_there() const { return !giver_of_.empty(); }
  // Whether the node gives a symbol its value.
  bool is_giver(const ir::Node& node) const { return givers_.contains(&node); }
  // The nodes that give the symbols which the node mentions, without the node itself.
  std::vector<const ir::Node*> givers_for(const ir::Node& node) const;

 private:
  std::unordered_map<std::string, const ir::Node*> giver_of_;  // by symbol
  std::unordered_set<const ir::Node*> givers_;
};

}  // namespace torch_ort::passes
