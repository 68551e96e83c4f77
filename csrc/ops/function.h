// Nodes that are functions of Python: ops of ONNX for which the engine has no calls of its own. A
// module of load_onnx calls the function in their place (torch_ort/onnx/functions); nothing else
// runs them.
#pragma once

#include "ops/op.h"

#include <string_view>
#include <vector>

namespace torch_ort::ops {

// A standard op is in this domain under its name, and one of another domain in
// "torch_ort.onnx.<domain>".
inline constexpr std::string_view kFunctionDomain = "torch_ort.onnx";
bool is_function(const ir::OpId& op);
// The row of all of them: any inputs, outputs and attributes.
Op function_op();

// Attributes of such a node beside those of the op: the positions of the inputs that are read as
// numbers, which are constants or sizes, and whether it draws random numbers.
inline constexpr const char* kFunctionNumbers = "torch_ort.numbers";
inline constexpr const char* kFunctionDraws = "torch_ort.draws";

// Gives the types of the outputs of a function; the room of Python's bindings sets it. It throws
// UserError where the inputs do not fit.
using FunctionTypes = std::vector<ir::Type> (*)(const ir::Node& node);
void set_function_types(FunctionTypes types);

}  // namespace torch_ort::ops
