// Questions about a program before there is a plan; for the files of plan/.
#pragma once

#include "plan/plan.h"

namespace torch_ort::plan {

inline int root_of(const Program& program, int tensor) {
  int root = program.tensors[tensor].root;
  return root < 0 ? tensor : root;
}

inline Kind kind_of(const Program& program, int tensor) {
  return program.tensors[root_of(program, tensor)].kind;
}

// Throws InternalError if the program is invalid in its given order: indices out of range, an alias
// of an alias, a read before any write, a write to memory that must not be written, or engine
// memory that is returned to the caller.
void check_program(const Program& program);

}  // namespace torch_ort::plan
