// Which operators a graph from a file may call. It may compute anything, but it may access only the
// tensors that it is given and those that it makes.
#pragma once

#include <string>

namespace c10 {
class OperatorHandle;
}

namespace torch_ort::ops {

// Why a graph from a file may not call the operator, as the end of a sentence; "" if it may. The
// schema decides, and the name where the schema does not show what an operator does.
std::string reason_to_refuse(const c10::OperatorHandle& op);

}  // namespace torch_ort::ops
