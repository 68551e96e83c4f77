// A change of dtype between the calls of a node.
#pragma once

#include "ops/call.h"

namespace torch_ort::ops {

// The value in a dtype: itself if it has it, else the result of a call that is added.
ir::Value* cast(CallList& calls, ir::Value* x, ir::DType dtype);

}  // namespace torch_ort::ops
