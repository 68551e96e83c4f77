// Sparse gradients. They are the only values of a graph that are not strided, and leave it as they
// are; a sum of two is the only thing that a graph makes of them. Their forms for captures are in
// torch_ort/rules/sparse.py.
#include "run/memory/owned.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_embedding_bag_backward.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/embedding_backward.h>
#include <ATen/ops/gather_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <vector>

namespace torch_ort::run {

namespace {

// During captures Python has PyTorch's formulas call the operators here.
using PyTorchsOwn = c10::impl::ExcludeDispatchKeyGuard;
constexpr c10::DispatchKey kByPython = c10::DispatchKey::PythonDispatcher;

// PyTorch's formulas give a sparse tensor whose indices and values are views of their arguments,
// which the engine overwrites.
at::Tensor with_own_memory(const at::Tensor& sparse, const std::vector<at::Tensor>& given) {
  const at::Tensor indices = owned(sparse._indices(), given);
  const at::Tensor values = owned(sparse._values(), given);
  return at::_sparse_coo_tensor_unsafe(indices, values, sparse.sizes(), sparse.options(),
                                       sparse.is_coalesced());
}

at::Tensor sparse_embedding_backward(const at::Tensor& gradient, const at::Tensor& indices,
                                     int64_t num_weights, int64_t padding_idx, bool scale) {
  const PyTorchsOwn guard(kByPython);
  return with_own_memory(
      at::embedding_backward(gradient, indices, num_weights, padding_idx, scale, true),
      {gradient, indices});
}

at::Tensor sparse_embedding_bag_backward(const at::Tensor& gradient, const at::Tensor& indices,
                                         const at::Tensor& offsets, const at::Tensor& offset2bag,
                                         const at::Tensor& bag_size,
                                         const at::Tensor& maximum_indices, int64_t num_weights,
                                         bool scale, int64_t mode,
                                         const std::optional<at::Tensor>& per_sample_weights,
                                         int64_t padding_idx) {
  const PyTorchsOwn guard(kByPython);
  return with_own_memory(
      at::_embedding_bag_backward(gradient, indices, offsets, offset2bag, bag_size, maximum_indices,
                                  num_weights, scale, mode, true, per_sample_weights, padding_idx),
      {gradient, indices});
}

at::Tensor sparse_gather_backward(const at::Tensor& gradient, const at::Tensor& source, int64_t dim,
                                  const at::Tensor& index) {
  const PyTorchsOwn guard(kByPython);
  return with_own_memory(at::gather_backward(gradient, source, dim, index, true),
                         {gradient, index});
}

// Either operand may be strided; then the sum is.
at::Tensor sparse_sum(const at::Tensor& a, const at::Tensor& b) {
  return a.is_sparse() && !b.is_sparse() ? b.add(a) : a.add(b);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_ort, library) {
  library.def(
      "sparse_embedding_backward(Tensor grad, Tensor indices, SymInt num_weights, "
      "SymInt padding_idx, bool scale_grad_by_freq) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "sparse_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, "
      "Tensor offset2bag, Tensor bag_size, Tensor maximum_indices, SymInt num_weights, "
      "bool scale_grad_by_freq, int mode, Tensor? per_sample_weights, int padding_idx) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.def("sparse_gather_backward(Tensor grad, Tensor self, int dim, Tensor index) -> Tensor",
              {at::Tag::pt2_compliant_tag});
  library.def("sparse_sum(Tensor self, Tensor other) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_ort, CompositeExplicitAutograd, library) {
  library.impl("sparse_embedding_backward", sparse_embedding_backward);
  library.impl("sparse_embedding_bag_backward", sparse_embedding_bag_backward);
  library.impl("sparse_gather_backward", sparse_gather_backward);
  library.impl("sparse_sum", sparse_sum);
}

}  // namespace torch_ort::run
