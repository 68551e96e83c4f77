// A region on a GPU: a kernel of its own text, built when the sizes are bound and started on the
// stream in force.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// Whether kernels read and write elements of this dtype.
bool can_load(ir::DType dtype);

// As region::Codegen::compile. Building begins at once; who runs the kernel first waits for it, and
// gets Unsupported if it does not build.
std::unique_ptr<const region::Kernel> make_region(const region::Schedule& schedule,
                                                  const ir::SymbolLookup& lookup,
                                                  const std::vector<region::Layout>& inputs,
                                                  const std::vector<region::Layout>& outputs,
                                                  const region::CodegenOptions& options);

// The generator of this room. It takes nothing where there is no driver or no NVRTC.
const region::Codegen& codegen();

}  // namespace torch_ort::cuda
