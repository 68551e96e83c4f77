#include "optim/operands.h"

#include "base/error.h"

#include <ATen/TensorSubclassLikeUtils.h>

namespace torch_ort::optim {

bool is_dense(const at::Tensor& tensor, c10::DeviceType device) {
  return tensor.defined() && tensor.device().type() == device && tensor.layout() == at::kStrided &&
         !at::isTensorSubclassLike(tensor) && !tensor.is_neg() &&
         tensor.is_non_overlapping_and_dense();
}

bool have_dtypes(const Tensors& operands) {
  bool has_double = false, has_less = false;
  for (const at::Tensor& each : operands) {
    const at::ScalarType dtype = each.scalar_type();
    has_double |= dtype == at::kDouble;
    has_less |= dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
    if (dtype != at::kDouble && !has_less) return false;
  }
  return has_double != has_less;
}

bool have_one_layout(const Tensors& operands, c10::DeviceType device) {
  const at::Tensor& first = operands.front();
  for (const at::Tensor& each : operands) {
    if (!is_dense(each, device)) return false;
    if (each.sizes() != first.sizes() || each.strides() != first.strides()) return false;
  }
  return have_dtypes(operands);
}

bool is_count(const at::Tensor& tensor, c10::DeviceType device) {
  return is_dense(tensor, device) && tensor.numel() == 1 &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
}

double count_of(const at::Tensor& steps) {
  if (steps.scalar_type() == at::kDouble) return *steps.const_data_ptr<double>();
  return *steps.const_data_ptr<float>();
}

double count_step(const at::Tensor& steps) {
  note_edit(steps);
  if (steps.scalar_type() == at::kDouble) return *steps.mutable_data_ptr<double>() += 1;
  return *steps.mutable_data_ptr<float>() += 1;
}

void note_edit(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_length(const char* what, size_t got, size_t want) {
  if (got == want) return;
  throw UserError(concat("optimizer step: ", what, ": got ", got, " of them, want ", want));
}

}  // namespace torch_ort::optim
