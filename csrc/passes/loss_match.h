// Finds the cross-entropy of a linear layer, in the forward and the backward half:
//
//   NllLoss(LogSoftmax(views, casts, slices and a soft cap of MatMul(hidden, weight^T) + bias))
//
// Results with a number for each row, such as logsumexp, may be computed beside it. A match
// computes what the LinearCrossEntropy kernel computes.
#pragma once

#include "ir/graph.h"
#include "ops/linear_loss.h"
#include "passes/multiples.h"

#include <optional>
#include <vector>

namespace torch_ort::passes::losses {

// The gradients as the matched nodes compute them.
struct Backward {
  // Of the loss; or the factor of which this gradient and those of the rows are multiples.
  ir::Value* gradient = nullptr;
  ir::Value *of_loss = nullptr, *of_sums = nullptr, *of_logsumexp = nullptr;
  std::vector<ir::Node*> hidden, weight, bias;
  // The sum with a gradient of the logits that comes from elsewhere.
  ir::Node* added = nullptr;
  ir::Value* elsewhere = nullptr;
  ir::Node* of_tanh = nullptr;  // the gradient of the soft cap
  ir::Node* square = nullptr;   // the sum with the gradient that comes from logsumexp
  int square_index = 0;         // which input of `square` the other gradient is
  std::vector<ir::Node*> nodes;

  bool has_any() const { return !hidden.empty() || !weight.empty() || !bias.empty(); }
};

struct Match {
  ir::Node *softmax, *loss, *product;
  ir::Node* sums = nullptr;  // the sums of logarithms
  // The product with class weights, before the logarithms are summed.
  ir::Node* weighting = nullptr;
  ir::Node* logsumexp = nullptr;
  // The nodes of a soft cap; the last one makes the logits. All three are in `chain`.
  ir::Node *inner = nullptr, *tanh = nullptr, *outer = nullptr;
  // The first of the replaced nodes that read logits.
  ir::Node* first = nullptr;
  // From the softmax back to the product, which is not included.
  std::vector<ir::Node*> chain;
  ir::Value *hidden, *weight, *bias = nullptr, *labels, *class_weight;
  ops::LinearLoss form;
  bool uses_library = false;  // region::KernelRow
  std::optional<Backward> backward;
  std::optional<Multiples> multiples;  // if there are numbers for each row
};

// Finds the loss around a softmax. Returns nothing if it is another loss, or if computing it in
// chunks would save little memory. Estimates sizes by the hints of the graph, and chooses the rows
// of a chunk, which are in `form`.
std::optional<Match> find_loss(const ir::Graph& graph, ir::Node& softmax);

Multiples::Factors factors_of(const Match& match, const ir::Value* number);
// The values that the new node, and the nodes that are added beside it, read.
std::vector<ir::Value*> read_first(const Match& match);
// The number of rows of the logits.
ir::Dim rows_of_product(const Match& match);

}  // namespace torch_ort::passes::losses
