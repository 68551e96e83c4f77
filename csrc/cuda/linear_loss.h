// The cross-entropy of a linear layer, with its gradients, in chunks of rows (ops/linear_loss.h).
//
// Products are those of the device's library (region/library.h), and the kernels of linear_loss.cuh
// run between them:
//
//   logits     = hidden * weight^T + bias      of the rows of a chunk, into the workspace
//   the loss of each row, and the gradient in place of its logits
//   hidden_grad  = gradient * weight
//   weight_grad += gradient^T * hidden
//
// A chunk is large: its logits take up to 256 MiB. Smaller ones would stay in the second-level
// cache between the products, but each chunk reads the weight twice, and reads and writes the
// gradient of the weight. For 8,192 rows of GPT-2 (50,257 classes of 768 numbers, bfloat16) chunks
// of 256 rows would move 12 GB of these to save 3 GB of logits.
//
// The library's fast kernels want numbers of columns that are multiples of 16 bytes (see
// run/memory/aligned_products.h). The classes beyond such a multiple, at most seven, have products
// of their own.
//
// Gradients of float16 are computed 2^k times as large, where 2^k is about the number of rows:
// those of a mean would be too small otherwise. The products divide by it.
#pragma once

#include "region/codegen.h"

#include <memory>

namespace torch_ort::cuda {

// Compiles a node LinearCrossEntropy with choose_library_chunks() rows. Compilation starts at once,
// as for a region. A label that is no class gives NaN, and the next call of a kernel throws
// IndexError (faults.h). Throws InternalError if the operands do not fit.
std::unique_ptr<const region::Kernel> make_linear_loss(const region::BoundNode& bound);

}  // namespace torch_ort::cuda
