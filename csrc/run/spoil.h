// Garbage in memory that is about to be written; internal to run/.
#pragma once

#include "run/context.h"

namespace torch_ort::run {

// Fills the memory of the results of a step with bits that are NaN, or -1, so that what a kernel
// reads of it, or leaves as it was, shows in numbers. Leaves alone results that lie in the memory
// of an operand or have gaps, and other devices than the CPU.
void spoil_results(const Context& context, const Step& step);

}  // namespace torch_ort::run
