// Written-out attention found in a graph, forward and backward:
//
//   MatMul(Dropout(Softmax(Where(mask, c, MatMul(q, Transpose(k)) * s) + mask)), v)
//
// A match is what the kernel computes, and nothing else reads what stands between.
#pragma once

#include "ir/graph.h"
#include "passes/attention_words.h"
#include "passes/known_sizes.h"

#include <optional>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes::attention {

// From the product of queries and keys to the softmax.
struct Scores {
  ir::Node* product = nullptr;
  double scale = 1;
  ir::Value* added = nullptr;
  std::optional<Filled> filled;
  Nodes nodes;

  bool is_masked() const { return added != nullptr || filled.has_value(); }
};

// From the softmax to the product with values.
struct Weights {
  ir::Node *product = nullptr, *dropout = nullptr;
  double keep = 1;
  std::vector<ir::Value*> values;
  Nodes nodes;
};

// From the gradient of the result to those of the factors of both products, as the products get
// them.
struct Backward {
  ir::Value* gradient = nullptr;
  ir::Value *query = nullptr, *key = nullptr, *value = nullptr;  // nullptr: nobody wants it
  Nodes nodes;
};

// A factor of a product, or what the program made it from, and the gradient of that.
struct Operand {
  ir::Value *value, *gradient;
  bool is_transposed;  // features stand before keys
};

struct Match {
  ir::Node* softmax;
  bool is_safe;
  ir::Shape shape;  // of the scores, [..., queries, keys]
  Scores scores;
  Weights weights;
  std::optional<Backward> backward;
  Operand query, key, value;
};

// All nodes that go with the match.
Nodes nodes_of(const Match& match);

// What the graph is, and does not cease to be while attention is replaced.
struct Scope {
  const ir::Graph& graph;
  const KnownSizes& sizes;
  const std::unordered_set<const ir::Node*>& backward;
};

// The attention around a softmax. Declines where anything else reads scores or probabilities, where
// a mask has a gradient, and for one head alone.
std::optional<Match> find_attention(const Scope& scope, ir::Node& softmax);

}  // namespace torch_ort::passes::attention
