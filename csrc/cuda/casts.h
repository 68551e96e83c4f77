// Casts many tensors in one launch, such as autocast's casts of a model's parameters.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// The name and the source text of the kernel between two floating-point dtypes.
struct CastsText {
  std::string name, text;
};
CastsText write_casts(ir::DType from, ir::DType to);

// Compiles a node Casts. Throws InternalError if a result has another size than its input or
// another dtype than the first result, and Unsupported if a tensor is not contiguous and row-major.
// Compilation starts at once, as for a region.
std::unique_ptr<const region::Kernel> make_casts(const region::BoundNode& bound);

}  // namespace torch_ort::cuda
