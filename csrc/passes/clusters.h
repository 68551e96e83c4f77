// What of a captured graph could be made again in the backward half, by name: clusters of nodes,
// and the layers of a transformer. Who chooses among them is recompute_plan.h, once the other
// passes have rewritten the graph: nodes say by Node::captured where they come from.
#pragma once

#include "ir/graph.h"

#include <string>
#include <vector>

namespace torch_ort::passes {

// What leads to a value that backward reads: its producer, and what that reads in turn, back to
// what backward reads anyway. Or what backward reads of a layer, back to what enters it.
struct Cluster {
  std::string name;  // the ops in their order, each with a plus behind it: "Dropout+"
  bool is_layer = false;
  std::vector<std::vector<int>> occurrences;  // in order; each the numbers of its nodes
};

struct Clusters {
  static constexpr int kNoLayer = -1;

  std::vector<Cluster> all;
  std::vector<int> layer_of;  // by number of a node; layers follow each other without a gap
  int num_layers = 0;
  int first = 0;  // the number of the first node of the first layer

  int layer(const ir::Node& node) const {
    const bool is_known = node.captured >= 0 && node.captured < static_cast<int>(layer_of.size());
    return is_known ? layer_of[node.captured] : kNoLayer;
  }
};

// Numbers the nodes of the forward half.
//
// A layer begins at a norm of which the input (norms in front) or the output (norms behind) is
// added to what attention makes of the norm, and goes to the next such norm; the last one goes to
// the last such sum. `is_extended`: clusters hold more than views, draws and point-wise nodes.
Clusters name_clusters(ir::Graph& graph, bool is_extended);

}  // namespace torch_ort::passes
