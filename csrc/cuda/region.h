// Compiles a region for a GPU: a kernel from a source text of its own, which is compiled when sizes
// are bound and launched on the current stream.
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
