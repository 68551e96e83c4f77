// The ATen node: any registered operator, with its arguments by their names.
//
//   org.pytorch.aten.ATen <operator = "aten::gelu_backward", overload_name = "", approximate = "none"> (grad, x)
//
// Tensors are inputs, in the order of the schema; `tensor_args` tells which arguments they fill:
// "grad_output" one tensor, "tensors:3" a list of three. Every other argument is an attribute. What is left
// out has its default; `none_args` names those that are None against their default.
#pragma once

#include <string>
#include <vector>

#include "ir/graph.h"
#include "ops/call.h"

namespace torch_ort::ops {

// Puts the arguments of an operator into the inputs and attributes of a node.
void encode_aten(const std::string& op, const std::string& overload,
                 const std::vector<std::string>& arg_names, const ArgList& args,
                 std::vector<ir::Value*>& inputs, ir::Attrs& attrs);

// The call that an ATen node stands for. UserError if the node does not fit the schema.
Call decode_aten(const ir::Node& node);

}  // namespace torch_ort::ops
