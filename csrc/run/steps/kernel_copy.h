// A copy between tensors of one dtype and different layouts, by a kernel of region/codegen.h.
#pragma once

#include "run/steps/out.h"

#include <memory>

namespace torch_ort::run {

// nullptr if the step is no such copy, or if the generator has no kernel that is faster than the
// one that the step names.
std::unique_ptr<BoundStep> bind_kernel_copy(const OutStep& step, Binder& binder);

}  // namespace torch_ort::run
