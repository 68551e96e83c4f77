// Rows of a gradient, added by their ids: the gradient of an embedding, and that of places along a
// dim. The kernels are in sorted_sums.cuh.
//
// PyTorch's kernel for embeddings writes the table twice where there are rows to add, since it
// clears all of it first, and allocates memory. Here each row of the table is written once, with
// zeros, which most of them are, or with the sum of its rows, and the workspace is planned. Up to 8
// rows are added as they come, more by 8 lines of threads, and more than 128 in parts, so that a
// frequent id does not keep one block busy. The stable sort takes two launches for each digit of up
// to 9 bits, or one for all if there are at most 2,048 ids. Counting all ids at once, in place of
// their digits, was weighed and not taken: it needs memory for each row of the table, and the ids
// of a row would have to be sorted after it.
//
// Along another dim than the first, a row is all that one place selects, and its columns are in
// several dims: a thread finds the offsets of its columns by division. Places are sorted once for
// all columns. If the last dim is indexed, the columns beside each other in a block are apart in
// memory, and blocks of the next rows run beside it, so that the second-level cache gathers what
// they read and write. There the first-level cache loads up to eight times what a thread needs;
// threads along the rows in place of the columns would not, but would need other sums for places
// that occur often.
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
