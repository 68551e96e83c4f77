// Losses.

#include "base/error.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

using ir::Node;
using ir::Shape;
using ir::Type;

// The reduction as PyTorch's kernels number it.
int64_t reduction(const Node& node) {
  const std::string kind = ir::string_attr(node.attrs, "reduction", "mean");
  if (kind == "none") return 0;
  if (kind == "mean") return 1;
  if (kind == "sum") return 2;
  throw UserError(concat(node.op.str(), ": reduction: got '", kind, "', want none, mean or sum"));
}

// Takes log-probabilities (N, C, ...) and the labels (N, ...).
std::vector<Type> infer_nll(const Node& node) {
  const Type &x = input(node, 0).type, &target = input(node, 1).type;
  if (x.shape && target.shape && x.shape->size() != target.shape->size() + 1) {
    throw UserError(concat(node.op.str(), ": target: got rank ", target.shape->size(), ", want ",
                           x.shape->size() - 1));
  }
  return {with_shape(x, reduction(node) == 0 ? target.shape : Shape{})};
}

// By default PyTorch ignores label -100, whereas ONNX ignores none. No class has this number.
constexpr int64_t kNoClass = -100;

void lower_nll(const Node& node, CallList& calls) {
  const size_t rank = known_shape(node, input(node, 0)).size();
  if (rank != 2 && rank != 4) {
    throw Unsupported(concat(node.op.str(), ": input: got rank ", rank, ", want 2 or 4"));
  }
  if (input(node, 1).type.dtype != ir::DType::kInt64) {
    throw Unsupported(concat(node.op.str(), ": dtype of the target: got ",
                             ir::name(input(node, 1).type.dtype), ", want int64"));
  }
  calls.add(rank == 2 ? "aten::nll_loss_forward" : "aten::nll_loss2d_forward", "",
            {node.inputs[0], node.inputs[1], has_input(node, 2) ? node.inputs[2] : nullptr,
             reduction(node), ir::int_attr(node.attrs, "ignore_index", kNoClass)},
            {node.outputs[0], nullptr});
}

}  // namespace

void register_loss(Registry& ops) {
  Op nll;
  nll.name = "NegativeLogLikelihoodLoss";
  nll.min_inputs = 2;
  nll.max_inputs = 3;
  nll.attributes = {{"ignore_index", AttrKind::kInt}, {"reduction", AttrKind::kString}};
  nll.since = 12;
  nll.bfloat16_since = 22;
  nll.infer = infer_nll;
  nll.lower = lower_nll;
  ops.add(nll);
}

}  // namespace torch_ort::ops
