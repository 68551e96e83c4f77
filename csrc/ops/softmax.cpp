// Ops that turn rows of numbers into distributions.

#include "ops/aten_names.h"
#include "ops/families.h"
#include "ops/shapes.h"

namespace torch_ort::ops {

namespace {

std::vector<ir::Type> infer_softmax(const ir::Node& node) {
  const ir::Type& type = input(node, 0).type;
  return {with_shape(type, type.shape)};
}

void lower_softmax(const ir::Node& node, CallList& calls) {
  const char* aten = node.op.name == "Softmax" ? "aten::_softmax" : "aten::_log_softmax";
  const auto rank = static_cast<int64_t>(known_shape(node, input(node, 0)).size());
  const int64_t axis = wrap_axis(node, ir::int_attr(node.attrs, "axis", -1), rank);
  calls.add(aten, "", {node.inputs[0], axis, false}, {node.outputs[0]});
}

}  // namespace

void register_softmax(Registry& ops) {
  for (const char* name : {"LogSoftmax", "Softmax"}) {
    Op op;
    op.name = name;
    op.attributes = {{"axis", AttrKind::kInt}};
    op.since = 13;
    op.infer = infer_softmax;
    op.lower = lower_softmax;
    ops.add(op);
  }
  for (const char* name : {"aten::_log_softmax", "aten::_softmax"}) {
    ops.add(Operator{.name = name, .row_argument = 1});
  }
  for (const char* name : {aten::kLogSoftmaxBackward, aten::kSoftmaxBackward}) {
    ops.add(Operator{.name = name, .row_argument = 2, .check = check_softmax_backward});
  }
}

}  // namespace torch_ort::ops
