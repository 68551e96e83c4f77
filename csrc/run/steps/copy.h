// A copy between tensors of one dtype and different layouts, 16 bytes at once (run/word_copy.h).
#pragma once

#include "run/steps/out.h"

#include <memory>

namespace torch_ort::run {

// nullptr if the step is no such copy, or if the kernel that it names does as well.
std::unique_ptr<BoundStep> bind_word_copy(const OutStep& step, Binder& binder);

}  // namespace torch_ort::run
