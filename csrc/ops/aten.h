// The ATen node: a call of any registered PyTorch operator, with its arguments by name.
//
//   org.pytorch.aten.ATen <operator = "aten::gelu_backward", overload_name = "", approximate =
//   "none"> (grad, x)
//
// Tensors are inputs of the node, in the order of the schema. The attribute `tensor_args` says
// which arguments they are: "grad_output" is one tensor, "tensors:3" a list of three. Every other
// argument is an attribute of its own. An argument without an attribute has its default;
// `none_args` lists those that are None although their default is another. Complex numbers are
// text: "(1.5+2j)".
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

// Whether a result shares memory with an argument that the call does not write. The schema says so,
// or, for the few operators whose schema does not, their row (Operator::gives_view).
bool gives_view(const c10::FunctionSchema& schema);

// Whether a call does more than compute results: it writes into an argument, draws random numbers,
// raises, moves a number to the host, or communicates with other processes.
bool has_effects(const c10::OperatorHandle& op);

// Whether a call may write into an argument.
bool may_write(const c10::FunctionSchema& schema);

// Whether PyTorch itself registers an operator of that name.
bool is_pytorchs(std::string_view op);

// Writes facts of the schema that passes ask for into the attributes of a node: `effects`, `writes`
// and `view` (see is_pure() in op.h). The node carries them because passes must not depend on
// PyTorch's registry. A caller may add effects that the schema does not show.
void add_facts(const c10::OperatorHandle& op, ir::Attrs& attrs);

// Encodes the arguments of an operator as inputs and attributes of a node.
void encode_aten(const std::string& op, const std::string& overload,
                 const std::vector<std::string>& arg_names, const ArgList& args,
                 std::vector<ir::Value*>& inputs, ir::Attrs& attrs);

// The name of what a node computes: the op if it is a standard one, the operator ("aten::mul") of
// an ATen node, else "".
std::string key_of(const ir::Node& node);

// The call that an ATen node encodes. Throws Unsupported if no such operator is registered, and
// UserError if the node does not fit the schema.
Call decode_aten(const ir::Node& node);

}  // namespace torch_ort::ops
