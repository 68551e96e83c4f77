// Copies outputs that are views of memory which stays in the engine; internal to run/.
#pragma once

#include "ops/call.h"

#include <vector>

namespace torch_ort::run {

// An output that is a view of a saved value gets a version counter of its own from autograd, so an
// in-place edit of it would go unnoticed. A view of engine memory must not be returned at all. This
// adds calls that copy such views to their half, and puts the copies in their place among `outputs`
// or `gradients`. `num_forward` is the number of calls before the border if `is_training`.
void copy_returned_views(ops::CallList& calls, size_t& num_forward, bool is_training,
                         std::vector<ir::Value*>& outputs, std::vector<ir::Value*>& gradients);

}  // namespace torch_ort::run
