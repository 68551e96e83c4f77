// An op and an operator of PyTorch that compute the same. It is said once, in the row of the op,
// and read both ways: nodes of the op become calls of the operator (lower_pair, and the lowerings
// of families), and calls of the operator become nodes of the op (convert/pairs.cpp).
#pragma once

#include "ir/graph.h"
#include "ops/call.h"

#include <string>
#include <vector>

namespace torch_ort::ops {

struct Pair {
  // Where the tensors of one stand in the other.
  enum class Form : uint8_t {
    kTensors,   // the inputs of the op are the first arguments of the operator
    kOperands,  // the same for two operands, of which one may be a number
    kReversed,  // two operands in the opposite order
    kTotal,     // one input, of which all elements become one
    kAlong,     // one input, whose elements become one along axes
  };
  // An argument after the tensors.
  struct Argument {
    const char* name;       // in the schema of the operator
    const char* attribute;  // of the op; nullptr: the op has no other value of it
    Arg value;              // if the node does not say it
    bool is_axis = false;
  };

  std::string aten;  // "aten::add"
  // The dtypes of operands with which a call becomes the op.
  bool (*accepts)(ir::DType) = nullptr;
  Form form = Form::kTensors;
  // The dtype of the result; kUndefined: that of the operands.
  ir::DType gives = ir::DType::kUndefined;
  std::vector<std::string> overloads = {""};
  std::vector<Argument> arguments = {};
  // Attributes that the op has where it computes the same.
  ir::Attrs attrs = {};
};

// Lowers a node to a call of the operator in the first pair of its op, which is one of tensors.
void lower_pair(const ir::Node& node, CallList& calls);

}  // namespace torch_ort::ops
