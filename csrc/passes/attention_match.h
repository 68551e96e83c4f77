// Finds attention that a program spells out, in the forward and the backward half:
//
//   MatMul(Dropout(Softmax(Where(mask, c, MatMul(q, Transpose(k)) * s) + mask)), v)
//
// A match computes what the attention kernel computes, and no other node reads the values in
// between.
#pragma once

#include "ir/graph.h"
#include "passes/attention_words.h"
#include "passes/known_sizes.h"

#include <optional>
#include <unordered_set>
#include <vector>

namespace torch_ort::passes::attention {

// The nodes from the product of queries and keys to the input of the softmax.
struct Scores {
  ir::Node* product = nullptr;
  double scale = 1;
  ir::Value* added = nullptr;
  std::optional<Filled> filled;
  Nodes nodes;

  bool is_masked() const { return added != nullptr || filled.has_value(); }
};

// The nodes from the softmax to the product with the values.
struct Weights {
  ir::Node *product = nullptr, *dropout = nullptr;
  double keep = 1;
  std::vector<ir::Value*> values;
  Nodes nodes;
};

// The nodes from the gradient of the result to the gradients of the factors of both products, as
// the products compute them.
struct Backward {
  ir::Value* gradient = nullptr;
  ir::Value *query = nullptr, *key = nullptr, *value = nullptr;  // nullptr: nobody reads it
  // The gradient of the masked scores, if others than the products read it. It is the gradient of
  // an added mask such as a learned bias for relative positions.
  ir::Value* scores = nullptr;
  Nodes nodes;
};

// A factor of a product, or a value that the program made it from, with the gradient of that value.
struct Operand {
  ir::Value *value, *gradient;
  bool is_transposed;  // the features are the dim before the keys
};

struct Match {
  ir::Node* softmax;
  bool is_safe;
  ir::Shape shape;  // of the scores: [..., queries, keys]
  Scores scores;
  Weights weights;
  std::optional<Backward> backward;
  Operand query, key, value;
};

// All nodes that the match replaces.
Nodes nodes_of(const Match& match);

// What a search needs to know of the graph. It stays valid while attention is replaced.
struct Scope {
  const ir::Graph& graph;
  const KnownSizes& sizes;
  const std::unordered_set<const ir::Node*>& backward;
};

// Finds the attention around a softmax. Returns nothing if another node reads scores or
// probabilities, or if there is only one head.
std::optional<Match> find_attention(const Scope& scope, ir::Node& softmax);

}  // namespace torch_ort::passes::attention
