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
// A product of few rows, such as that of one token, takes as long as the memory needs to bring the
// right factor. It is streamed, which few_rows_loops.h describes. The order of its sums depends on
// which of the two ways a product takes, but not on the number of threads.
//
// RowsProduct computes only those rows that a list names at run time.
//
// The register kernel takes the numbers with which sums start, so that a bias needs no pass of its
// own, and serves attention and gradients of convolutions too. No library was taken instead:
// oneDNN's `dnnl_sgemm` is only available as 40 MB with libOpenCL (Debian), or in a wheel that
// ended in 2023, and nothing could be fused with it.
//
// Regions are not fused into products, although that was built and measured: a region ran on blocks
// of a product while these were in the second-level cache, with sums over rows, row reductions,
// lists of rows and several products. Training steps took as long or longer. A region that reads a
// result from the third-level cache loses little, and blocks that a region can follow are worse for
// the product. Only large results with short sums gained a little. What a bias costs is saved in
// any case.
//
// Figures for both are in benchmarks/results/decisions.md.
#pragma once

#include "cpu/region.h"
#include "region/codegen.h"

#include <memory>

namespace torch_ort::cpu {

// Whether make_product() has a kernel for all operands in one floating-point dtype.
bool is_of_floats(const region::Product& product);

// Whether the kernel here is expected to be faster than torch's, judged by dtypes and sizes. A
// function decides rather than a timing, so that runs repeat bit for bit (run/tuning.h times).
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
