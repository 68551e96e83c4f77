// A copy between tensors of one dtype and different layouts, other than by the kernel that the step
// names: on GPUs 16 bytes at once (run/word_copy.h), else by a kernel of region/codegen.h.
#pragma once

#include "region/codegen.h"
#include "run/steps/out.h"

#include <memory>

namespace torch_ort::run {

// The kernel that copies a slot to memory of a layout, in a result of the step; nullptr if
// PyTorch's copy does as well.
std::shared_ptr<const region::Kernel> compile_copy(const Step& step, int source,
                                                   const region::Layout& to, const Binder& binder);

// nullptr if the step is no such copy, or if the kernel that it names does as well.
std::unique_ptr<BoundStep> bind_copy(const OutStep& step, Binder& binder);

}  // namespace torch_ort::run
