// How results come to lie in memory that is planned for them, where the schema of an operator has
// no `out=` for it.
#pragma once

#include "ops/call.h"

namespace torch_ort::ops {

// An operator in place that overwrites its first argument whole, whatever it held.
struct OverwriteForm {
  const char* op = nullptr;  // "aten::copy_"
  const char* overload = "";
  // What follows the overwritten argument, from the arguments of the functional call.
  ArgList (*args)(const ArgList& functional_args) = nullptr;
  bool over_operands = false;  // the result may lie where an operand of its layout does
};

// Appends calls that compute the same bits and have `out=` forms. False, and nothing appended, for
// a form of the call that has none.
using OutRewrite = bool (*)(const Call& call, bool on_cpu, CallList& calls);

}  // namespace torch_ort::ops
