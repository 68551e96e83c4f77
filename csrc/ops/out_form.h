// How an operator writes its result into planned memory where its schema has no `out=` overload for
// that.
#pragma once

#include "ops/call.h"

namespace torch_ort::ops {

// An in-place operator that overwrites its whole first argument and reads nothing of it.
struct OverwriteForm {
  const char* op = nullptr;  // "aten::copy_"
  const char* overload = "";
  // The arguments after the overwritten one, made from those of the functional call.
  ArgList (*args)(const ArgList& functional_args) = nullptr;
  // The result may be written over an operand of the same layout.
  bool over_operands = false;
};

// Appends calls that compute the same bits and have `out=` overloads. Returns false, and appends
// nothing, for calls that cannot be rewritten so.
using OutRewrite = bool (*)(const Call& call, bool on_cpu, CallList& calls);

}  // namespace torch_ort::ops
