// Products of matrices and of batches of them, and what is added to them.
//
// Panels of the right factor are packed, and multiplied with the rows of the left one by the
// register kernel of product_loops.h (Goto and van de Geijn, "Anatomy of high-performance matrix
// multiplication", 2008). A factor that the kernel can read where it lies is packed only where
// that pays. Threads share the rows and the columns of the result. Each packs for itself, into
// memory that it keeps and whose size does not grow with the product: a product of new sizes costs
// nothing more than one of old sizes. A number of the result is summed in one order, whatever the
// number of threads.
//
// RowsProduct takes part of the rows alone, which a list names when it runs.
#pragma once

#include "cpu/region.h"
#include "region/codegen.h"

#include <memory>

namespace torch_ort::cpu {

// Whether there is a kernel for it: all operands are of one dtype of floats.
bool is_of_floats(const region::Product& product);

// Whether the product is one for which the kernel here is faster than that of torch, as far as
// types and sizes tell.
bool is_preferred(const region::Product& product, Isa isa);

// The operands may also be any of float32, bfloat16 and float16, each its own.
// InternalError on sizes that do not fit each other, Unsupported on other dtypes.
std::unique_ptr<const Kernel> make_product(const region::Product& product, Isa isa);

// The same of listed rows, for matrices alone. `rows` is the last input: how many rows are listed,
// and then their numbers, which increase; what stands behind these is not read. They are rows of a,
// of the start if it has as many, and of the result, whose other rows are left as they are; with
// `sums` columns of a and rows of b, of which no others are summed over. IndexError when it runs
// with a list that does not increase or names rows that there are not.
std::unique_ptr<const Kernel> make_rows_product(const region::Product& product, const Layout& rows,
                                                bool sums, Isa isa);

}  // namespace torch_ort::cpu
