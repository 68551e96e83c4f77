// The gradient of an embedding: rows of the incoming gradient, added by their id. The kernels are
// in embedding.cuh.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// Compiles a node EmbeddingGrad that has a workspace (ops/embedding_grad.h). The ids are int32 or
// int64, and both they and the gradient may have any strides. Compilation starts at once, as for a
// region. An id that is not a row of the table is left out, and the next call of a kernel throws
// IndexError (faults.h). Throws InternalError if the operands do not fit, and Unsupported if there
// are more than 2^31 ids or rows.
std::unique_ptr<const region::Kernel> make_embedding_grad(
    const ir::Node& node, const std::vector<region::Layout>& inputs,
    const std::vector<region::Layout>& outputs, const region::CodegenOptions& options);

}  // namespace torch_ort::cuda
