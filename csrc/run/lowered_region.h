// Regions whose nodes run one by one: in the place of a kernel that no generator makes, and beside
// one, to see that it computes the same.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::run {

// A region over one set of sizes.
struct BoundRegion {
  const ir::Node& node;  // with a body
  const ir::SymbolLookup& lookup;
  const std::vector<region::Layout>&inputs, &outputs;
  const region::CodegenOptions& options;
};

// A kernel that calls an operator for each node of the body, and copies the results into place.
std::unique_ptr<const region::Kernel> make_lowered(const BoundRegion& region);

// Runs `kernel`, and the nodes one by one on the same operands: in the dtype that kernels compute
// in, and in double precision. What lies between these two is what rounding does to the region, and
// the kernel may be as far off. Raises InternalError, naming the region, where a result is not.
std::unique_ptr<const region::Kernel> make_checked(std::shared_ptr<const region::Kernel> kernel,
                                                   const BoundRegion& region);

}  // namespace torch_ort::run
