// The loss of a linear layer found in a graph, forward and backward:
//
//   NllLoss(LogSoftmax(views, casts, slices and a soft cap of MatMul(hidden, weight^T) + bias))
//
// with numbers of rows beside it. A match is what the kernel computes.
#pragma once

#include "ir/graph.h"
#include "ops/linear_loss.h"
#include "passes/multiples.h"

#include <optional>
#include <vector>

namespace torch_ort::passes::losses {

// Gradients as the old nodes make them.
struct Backward {
  ir::Value* gradient = nullptr;  // of the loss; or what that and those of rows are multiples of
  ir::Value *of_loss = nullptr, *of_sums = nullptr, *of_logsumexp = nullptr;
  std::vector<ir::Node*> hidden, weight, bias;
  ir::Node* added = nullptr;  // the sum with a gradient that logits have from elsewhere
  ir::Value* elsewhere = nullptr;
  ir::Node* of_tanh = nullptr;  // where it goes through a soft cap
  ir::Node* square = nullptr;   // the sum with what comes from the logarithm of the sum of powers
  int square_index = 0;         // where it has the other gradient
  std::vector<ir::Node*> nodes;

  bool has_any() const { return !hidden.empty() || !weight.empty() || !bias.empty(); }
};

struct Match {
  ir::Node *softmax, *loss, *product;
  ir::Node* sums = nullptr;       // of logarithms
  ir::Node* weighting = nullptr;  // by weights of classes, before they are summed
  ir::Node* logsumexp = nullptr;
  // Of a soft cap, the last of which makes the logits; all three stand in the chain.
  ir::Node *inner = nullptr, *tanh = nullptr, *outer = nullptr;
  ir::Node* first = nullptr;     // of the nodes that are replaced and read logits
  std::vector<ir::Node*> chain;  // from the softmax up to the product, that one not included
  ir::Value *hidden, *weight, *bias = nullptr, *labels, *class_weight;
  ops::LinearLoss form;
  std::optional<Backward> backward;
  std::optional<Multiples> multiples;  // where rows have numbers of their own
};

// Nothing where the loss is another one, or where chunks save little memory. Weighs sizes by the
// hints of the graph, and says in the form how many rows a chunk has.
std::optional<Match> find_loss(const ir::Graph& graph, ir::Node& softmax);

Multiples::Factors factors_of(const Match& match, const ir::Value* number);
// What the new node and those beside it read.
std::vector<ir::Value*> read_first(const Match& match);
// How many rows the logits have.
ir::Dim rows_of_product(const Match& match);

}  // namespace torch_ort::passes::losses
