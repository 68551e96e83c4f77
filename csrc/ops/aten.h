// The ATen node: any registered operator, with its arguments by their names.
//
//   org.pytorch.aten.ATen <operator = "aten::gelu_backward", overload_name = "", approximate =
//   "none"> (grad, x)
//
// Tensors are inputs, in the order of the schema; `tensor_args` tells which arguments they fill:
// "grad_output" one tensor, "tensors:3" a list of three. Every other argument is an attribute. What
// is left out has its default; `none_args` names those that are None against their default. Complex
// numbers stand as text: "(1.5+2j)".
#pragma once

#include "ir/graph.h"
#include "ops/call.h"

#include <string>
#include <string_view>
#include <vector>

namespace c10 {
class OperatorHandle;
struct FunctionSchema;
}  // namespace c10

namespace torch_ort::ops {

// Whether a result shares the memory of an argument, without writing to it: as the schema says, or,
// for the few operators named "unsafe", as it does not say.
bool gives_view(const c10::FunctionSchema& schema);

// Whether a call does more than to give results: it writes, draws random numbers, raises, gives a
// number to the host, or meets other processes.
bool has_effects(const c10::OperatorHandle& op);

// Whether a call may write what it is given.
bool may_write(const c10::FunctionSchema& schema);

// Whether an operator of that name is one that PyTorch itself brings.
bool is_pytorchs(std::string_view op);

// Facts of the schema that passes need and that the node must carry, for it is not in the registry
// by itself: whether it has effects, whether it may write, whether it gives a view. A node may have
// more effects.
void add_facts(const c10::OperatorHandle& op, ir::Attrs& attrs);

// Puts the arguments of an operator into the inputs and attributes of a node.
void encode_aten(const std::string& op, const std::string& overload,
                 const std::vector<std::string>& arg_names, const ArgList& args,
                 std::vector<ir::Value*>& inputs, ir::Attrs& attrs);

// What tells nodes apart: the standard op, or the operator of an ATen node; empty for others.
std::string key_of(const ir::Node& node);

// The call that an ATen node stands for. UserError if the node does not fit the schema.
Call decode_aten(const ir::Node& node);

}  // namespace torch_ort::ops
