// Outputs that are views of what stays behind; internal to run/.
#pragma once

#include "ops/call.h"

#include <vector>

namespace torch_ort::run {

// Autograd gives an output that looks at a saved value a version counter of its own, so that an
// edit of it in place would go unnoticed; and memory of the engine must not leave at all. Such a
// view is copied: calls are added to its half, and the copy stands in its place among `outputs` or
// `gradients`. `num_forward`: the calls before the border, where `is_training`.
void copy_views_that_leave(ops::CallList& calls, size_t& num_forward, bool is_training,
                           std::vector<ir::Value*>& outputs, std::vector<ir::Value*>& gradients);

}  // namespace torch_ort::run
