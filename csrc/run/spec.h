// Tensors of known size: what is needed to make them; internal to run/.
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
  int64_t bytes = 0;  // from the first element to the end of the last one
};

// A view as it stands over a tensor of known sizes: made once, pointed at the memory of each call.
struct ViewSpec {
  int slot = -1;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // elements after the first one of what it looks at
};

int64_t span_bytes(const TensorSpec& spec);
TensorSpec spec_of(const at::Tensor& tensor);
// Of a value whose type is known. UserError if no tensor can have its sizes and strides.
TensorSpec spec_of(const ir::Value& value, const ir::SymbolLookup& lookup);
bool equals(const TensorSpec& spec, const at::Tensor& tensor);
// Whether the elements fill one block of memory, each place once, in some order of the dims.
bool is_dense(const TensorSpec& spec);
// Whether two elements may have one place: in order of the strides, a step lands on elements which
// smaller steps have reached.
bool may_overlap(const TensorSpec& spec);
bool is_row_major(const TensorSpec& spec);
// Whether they say the same: the stride of a dim of one element, or of none, says nothing.
bool same_strides(c10::IntArrayRef sizes, c10::IntArrayRef a, c10::IntArrayRef b);
// Whether the tensor has these sizes, this dtype and these strides.
bool has_layout(const at::Tensor& tensor, const TensorSpec& spec);
// UserError if a tensor of the run has not the sizes that the type of `value` says.
void check_sizes(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);
// UserError unless a result of Python code has the sizes, dtype and device that capture learnt.
void check_learnt(const std::string& what, const TensorSpec& spec, const at::Tensor& tensor);
// Nor its dtype and strides.
void check_layout(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);

// A copy with the strides and the dtype that the type of `value` says: a kernel may give its result
// others than its shape rule promised. UserError if the sizes are others too.
at::Tensor as_promised(const ir::Value& value, const TensorSpec& spec, const at::Tensor& tensor);

std::vector<int64_t> eval_dims(const ir::Shape& dims, const ir::SymbolLookup& lookup);

at::Tensor make_tensor(const TensorSpec& spec);  // with memory of its own

// Whether a tensor is a conjugate or negative view: its numbers are not those in its memory, which
// only PyTorch's dispatcher knows of.
inline bool is_computed_by_reader(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg());
}
// The same numbers with the same strides, in memory as they are.
at::Tensor computed(const at::Tensor& tensor);
// All of them so; nothing if they are already.
std::optional<std::vector<at::Tensor>> computed(const std::vector<at::Tensor>& tensors);

at::Tensor tensor_over(c10::Storage storage, const TensorSpec& spec, int64_t byte_offset);
c10::Storage storage_without_memory(int64_t bytes, c10::Device device);

}  // namespace torch_ort::run
