// What the files of this room ask of a program before there is a plan.
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

// Raises InternalError if the program makes no sense in the order it is given in: indices out of
// range, an alias of an alias, a read before any write, a write to memory that may not be written,
// engine memory that leaves.
void check_program(const Program& program);

}  // namespace torch_ort::plan
