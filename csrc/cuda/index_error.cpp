#include "cuda/index_error.h"

#include <c10/util/Exception.h>

namespace torch_ort::cuda {

void raise_index_error(const std::string& message) { TORCH_CHECK_INDEX(false, message); }

}  // namespace torch_ort::cuda
