// The layout of tensors of known size; internal to run/.
#pragma once

#include "ir/graph.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_ort::run {

struct TensorSpec {
  bool known = false;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device{c10::kCPU};
  int64_t bytes = 0;  // from the first element to the end of the last
};

// A view of a tensor of known sizes. It is described once and applied to the memory of each call.
struct ViewSpec {
  int slot = -1;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // in elements, from the first element of its base
};

int64_t span_bytes(const TensorSpec& spec);
TensorSpec spec_of(const at::Tensor& tensor);
// The layout of a value whose type is known. Throws UserError if no tensor can have these sizes and
// strides.
TensorSpec spec_of(const ir::Value& value, const ir::SymbolLookup& lookup);
bool equals(const TensorSpec& spec, const at::Tensor& tensor);
// Whether the elements fill one block of memory without gaps or overlaps, in some order of dims.
bool is_dense(const TensorSpec& spec);
// Whether two elements may have the same address. It compares, in order of strides, each stride
// with the range that smaller strides cover, and so may say yes where there is no overlap.
bool may_overlap(const TensorSpec& spec);
bool is_row_major(const TensorSpec& spec);
// Whether strides are equal in effect: those of dims with one element or none do not matter.
bool same_strides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b);
// Both tensors are views of all of the same dense memory. Returns the strides of `other` if `one`
// had `strides`; nothing if no strides describe it.
std::optional<std::vector<int64_t>> strides_like(const TensorSpec& one,
                                                 const std::vector<int64_t>& strides,
                                                 const TensorSpec& other);
// Whether the tensor has this dtype and these sizes and strides.
bool has_layout(const at::Tensor& tensor, const TensorSpec& spec);
// Throws UserError if a tensor does not have the sizes in the type of `value`.
void check_sizes(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);
// Throws UserError unless a result of Python code has the sizes, the dtype and the device that the
// capture learned.
void check_learnt(const std::string& what, const TensorSpec& spec, const at::Tensor& tensor);
// As check_sizes(), and compares the dtype and strides too.
void check_layout(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);

// Returns a copy with the strides and the dtype in the type of `value`, since a kernel may return
// others than its shape rule promised. Throws UserError if the sizes differ too.
at::Tensor as_promised(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);

std::vector<int64_t> eval_dims(const ir::Shape& dims, const ir::SymbolLookup& lookup);

at::Tensor make_tensor(const TensorSpec& spec);  // with memory of its own

// Whether the tensor has a conjugate or negative bit, or is PyTorch's of zeros without memory. Its
// elements then differ from those in memory, which only PyTorch's dispatcher knows.
inline bool is_computed_by_reader(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor());
}
// Returns a tensor with the same elements and strides, which are in its memory.
at::Tensor computed(const at::Tensor& tensor);
// Does the same for all tensors; nothing if all have their elements in memory.
std::optional<std::vector<at::Tensor>> computed(const std::vector<at::Tensor>& tensors);

at::Tensor tensor_over(c10::Storage storage, const TensorSpec& spec, int64_t byte_offset);
c10::Storage storage_without_memory(int64_t bytes, c10::Device device);

}  // namespace torch_ort::run
