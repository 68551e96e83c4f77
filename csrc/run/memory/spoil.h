// Fills memory that is about to be written with garbage; internal to run/.
#pragma once

#include "run/context.h"

namespace torch_ort::run {

// Fills the memory of a step's results with bits that are NaN or -1, so that it shows in the
// results if a kernel reads them or does not overwrite them. Skips results that overwrite an
// operand or have gaps, and devices other than the CPU.
void spoil_results(const Context& context, const Step& step);

}  // namespace torch_ort::run
