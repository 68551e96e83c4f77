// Rows of a gradient, added by their ids: the gradient of an embedding, and that of places along a
// dim. The kernels are in sorted_sums.cuh.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// Compiles a node EmbeddingGrad or TakeGrad that has a workspace (ops/sorted_sums.h). The ids are
// int32 or int64, and all tensors but the workspace may have any strides. Compilation starts at
// once, as for a region. An id that is not a row of the table is left out, and the next call of a
// kernel throws IndexError (faults.h). Throws InternalError if the operands do not fit, and
// Unsupported if there are more than 2^31 ids or rows.
std::unique_ptr<const region::Kernel> make_sorted_sums(const region::BoundNode& bound);

}  // namespace torch_ort::cuda
