// Casts of many tensors in one launch: what autocast makes of a model's parameters.
#pragma once

#include "region/codegen.h"

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::cuda {

// The text of the kernel between two dtypes of floats, and its name.
struct CastsText {
  std::string name, text;
};
CastsText write_casts(ir::DType from, ir::DType to);

// Of the op Casts. Raises InternalError if a result has another size than what is cast, or another
// dtype than the first; Unsupported if one of them does not lie row by row, without gaps. Building
// begins at once, as for a region.
std::unique_ptr<const region::Kernel> make_casts(const std::vector<region::Layout>& inputs,
                                                 const std::vector<region::Layout>& outputs,
                                                 const region::CodegenOptions& options);

}  // namespace torch_ort::cuda
