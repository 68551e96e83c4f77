#include "run/memory/owned.h"

#include <algorithm>

namespace torch_ort::run {

at::Tensor owned(const at::Tensor& tensor, const std::vector<at::Tensor>& others) {
  const auto lies_in = [&tensor](const at::Tensor& other) {
    return other.defined() && other.has_storage() && tensor.is_alias_of(other);
  };
  if (!tensor.defined() || !tensor.has_storage()) return tensor;
  return std::any_of(others.begin(), others.end(), lies_in) ? tensor.clone() : tensor;
}

}  // namespace torch_ort::run
