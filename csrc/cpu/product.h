// Products of matrices and of batches of them, with an optional tensor that is added.
//
// Panels of the right factor are packed and multiplied with the rows of the left one by the
// register kernel of product_loops.h (Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication", 2008). A factor that the kernel can read in place is packed only if that pays.
// Threads divide the rows and columns of the result among themselves. Each thread packs into memory
// that it keeps, and whose size does not depend on the size of the product, so that products of new
// sizes allocate nothing. Each number of the result is summed in one order, whatever the number of
// threads.
//
// RowsProduct computes only those rows that a list names at run time.
#pragma once

#include "cpu/region.h"
#include "region/codegen.h"

#include <memory>

namespace torch_ort::cpu {

// Whether make_product() has a kernel for all operands in one floating-point dtype.
bool is_of_floats(const region::Product& product);

// Whether the kernel here is expected to be faster than torch's, judged by dtypes and sizes.
bool is_preferred(const region::Product& product, Isa isa);

// Compiles a product. The operands may also have different dtypes among float32, bfloat16 and
// float16. Throws InternalError on sizes that do not match, and Unsupported on other dtypes.
std::unique_ptr<const Kernel> make_product(const region::Product& product, Isa isa);

// As make_product(), for listed rows; for matrices, not for batches. `rows` is the last input: the
// number of listed rows, followed by their indices in increasing order; numbers after these are not
// read. The list selects rows of a, of the start if it has as many, and of the result, whose other
// rows are not written. With `sums` it selects columns of a and rows of b, and the sums leave out
// all others. When it runs, it throws IndexError on a list that does not increase or that names
// rows which do not exist.
std::unique_ptr<const Kernel> make_rows_product(const region::Product& product, const Layout& rows,
                                                bool sums, Isa isa);

}  // namespace torch_ort::cpu
