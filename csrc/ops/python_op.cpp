// One torch.autograd.Function in a graph: PythonOp runs its forward, PythonOpGrad its backward.
// Besides the attributes that describe the call, as ONNX Runtime Training has them, `function` is
// the key of run/autograd/python_op.h, and `sizes` are the sizes of tensors among the arguments.

#include "ops/families.h"

namespace torch_ort::ops {

namespace {

void lower_python_op(const ir::Node& node, CallList& calls) {
  calls.add("torch_ort::python_op", "",
            {Arg::values(node.inputs), Arg::list(ir::ints_attr(node.attrs, "sizes", {})),
             ir::int_attr(node.attrs, "function", 0)},
            node.outputs);
}

void lower_python_op_grad(const ir::Node& node, CallList& calls) {
  calls.add("torch_ort::python_op_grad", "",
            {node.inputs.at(0), Arg::values({node.inputs.begin() + 1, node.inputs.end()}),
             ir::int_attr(node.attrs, "function", 0)},
            node.outputs);
}

Op python_op(const char* name, int min_inputs, Lowering lower) {
  Op op;
  op.name = name;
  op.domain = ir::kMicrosoftDomain;
  op.min_inputs = min_inputs;
  op.max_inputs = -1;
  op.max_outputs = -1;
  op.any_attributes = true;
  op.lower = lower;
  op.pure = false;
  return op;
}

}  // namespace

void register_python_op(Registry& ops) {
  ops.add(python_op("PythonOp", 0, lower_python_op));
  ops.add(python_op("PythonOpGrad", 1, lower_python_op_grad));
}

}  // namespace torch_ort::ops
