// The border between the forward and the backward half of a training graph.

#include "ops/families.h"

#include <algorithm>

namespace torch_ort::ops {

namespace {

// One gradient for each output of the module, except for those that are listed as not
// differentiable.
std::vector<ir::Type> infer_yield(const ir::Node& node) {
  const ir::Shape skipped = ir::ints_attr(node.attrs, "non_differentiable_outputs", {});
  std::vector<ir::Type> types;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const ir::Dim index = static_cast<int64_t>(i);
    if (std::find(skipped.begin(), skipped.end(), index) != skipped.end()) continue;
    types.push_back(node.inputs[i] != nullptr ? node.inputs[i]->type : ir::Type());
    // Gradients from the caller are row-major unless the node states other strides.
    types.back().strides.reset();
  }
  types.resize(node.outputs.size());
  return types;
}

}  // namespace

void register_training(Registry& ops) {
  Op yield;
  yield.name = "YieldOp";
  yield.domain = ir::kMicrosoftDomain;
  yield.min_inputs = 0;
  yield.max_inputs = -1;
  yield.max_outputs = -1;
  yield.attributes = {{"full_shape_outputs", AttrKind::kInts},
                      {"non_differentiable_outputs", AttrKind::kInts}};
  yield.infer = infer_yield;
  yield.pure = false;
  ops.add(yield);
}

}  // namespace torch_ort::ops
