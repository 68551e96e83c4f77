// Compiles a region for a GPU: a kernel from a source text of its own, which is compiled when sizes
// are bound and launched on the current stream.
//
// A text depends on the body, the dtypes, the kinds of layout and the shape of the blocks, which
// sizes choose among powers of two (schema.h); sizes and strides are its arguments. So the layers
// of a model share the kernels of one, and new sizes seldom need a new kernel. Sizes divide by a
// factor and a shift, and strips of rows are an axis of the grid, so that an element costs few
// instructions beside its own.
//
// A thread reads 16 bytes at once if the layouts of the operands allow it, in contiguous tensors or
// in runs such as heads of attention. Rows of an odd number of columns, such as logits of 50,257
// words, are cut: each begins within a vector, or after a gap. If all operands are cut at the same
// places, as dense ones are, the first and the last vector of a row are accessed by elements and
// all others whole, and what is outside of the row is left out of reductions. If the rows of
// results begin with vectors, as those of a gradient that a product reads do, inputs that are cut
// elsewhere are put together from two vectors.
//
// Rows that are reduced stay in registers between passes over their columns, short floats as they
// are in memory. If rows are too long, each pass reads and computes them again. If there are also
// so few of them that most of a GPU would be idle (the norm of a whole tensor, a group norm of
// large images), rows are split: each pass is a kernel of its own, whose blocks reduce strips of a
// row and first combine what earlier passes have found for all strips. A thread reads all of its
// vectors, or those of a step, before it computes with the first: with 16 warps on a multiprocessor
// and one access under way for each, memory would reach about half of its bandwidth.
//
// Sums over rows are partial sums of blocks, whose number depends on sizes alone, and a second
// kernel adds them in order: no atomics, and the same bits on every GPU.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// Whether kernels read and write elements of this dtype.
bool can_load(ir::DType dtype);

// As region::Codegen::compile. Compilation starts at once. The first run of the kernel waits for
// it, and throws Unsupported if the text does not compile.
std::unique_ptr<const region::Kernel> make_region(const region::Schedule& schedule,
                                                  const ir::SymbolLookup& lookup,
                                                  const std::vector<region::Layout>& inputs,
                                                  const std::vector<region::Layout>& outputs,
                                                  const region::CodegenOptions& options);

// The code generator of GPUs. It accepts nothing if there is no driver or no NVRTC.
const region::Codegen& codegen();

}  // namespace torch_ort::cuda
