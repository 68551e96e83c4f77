// Runs the nodes of a region one by one: instead of a kernel if there is no generator, or beside a
// kernel to check it.
//
// Under TORCH_ORT_CHECK=3 the nodes run beside the kernel twice, once in its own precision and once
// in double. The difference between these two shows how far off a kernel may be, so that no
// tolerance is guessed.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

// A region with known sizes.
struct BoundRegion {
  const ir::Node& node;  // a Region node with its body
  const ir::SymbolLookup& lookup;
  const std::vector<region::Layout>&inputs, &outputs;
  const region::CodegenOptions& options;
};

// Makes a kernel that calls an operator for each node of the body and copies the results into
// place.
std::unique_ptr<const region::Kernel> make_lowered(const BoundRegion& region);

// Makes a kernel that runs `kernel`, and on the same operands the nodes one by one, once in the
// dtype that kernels compute in and once in double precision. The difference between these two
// shows the rounding error of the region, which the kernel may have as well. Throws InternalError
// with the name of the region if a result differs by more.
std::unique_ptr<const region::Kernel> make_checked(std::shared_ptr<const region::Kernel> kernel,
                                                   const BoundRegion& region);

}  // namespace torch_ort::run
