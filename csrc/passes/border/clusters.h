// Names what the backward half of a captured graph could recompute: clusters of nodes, and the
// layers of a transformer. plan.h chooses among them after other passes have rewritten
// the graph; Node::captured says which captured node each node comes from.
#pragma once

#include "ir/graph.h"

#include <string>
#include <vector>

namespace torch_ort::passes {

// A cluster has the producer of a value that backward reads, the producers of its inputs, and so
// on, back to values that backward reads in any case. A layer has all that backward reads of it,
// back to its inputs. Occurrences of the same name are one Cluster.
struct Cluster {
  std::string name;  // its ops in order, each followed by a plus: "Dropout+"
  bool is_layer = false;
  std::vector<std::vector<int>> occurrences;  // in order; each has the numbers of its nodes
};

struct Clusters {
  static constexpr int kNoLayer = -1;

  std::vector<Cluster> all;
  std::vector<int> layer_of;  // by number of a node; layers are consecutive
  int num_layers = 0;
  int first = 0;  // the number of the first node of the first layer

  int layer(const ir::Node& node) const {
    const bool is_known = node.captured >= 0 && node.captured < static_cast<int>(layer_of.size());
    return is_known ? layer_of[node.captured] : kNoLayer;
  }
};

// Numbers the nodes of the forward half and finds the clusters.
//
// A layer begins at a norm. In pre-norm models the input of that norm, in post-norm models its
// output, is added to the result of the attention that the norm feeds. The layer ends at the next
// such norm, and the last layer at the last such sum. With `is_extended` clusters may contain more
// than views, random draws and point-wise nodes.
Clusters name_clusters(ir::Graph& graph, bool is_extended);

}  // namespace torch_ort::passes
