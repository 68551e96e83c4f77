// Which operators a graph from a file may call. What it computes is its business; it reads and
// writes nothing but the tensors that it is given and makes.
#pragma once

#include <string>

namespace c10 {
class OperatorHandle;
}

namespace torch_ort::ops {

// Why a graph from a file may not call the operator, as the end of a sentence; "" if it may.
// Decided by the schema, and by name where a schema does not tell what an operator does.
std::string reason_to_refuse(const c10::OperatorHandle& op);

}  // namespace torch_ort::ops
