// Arguments of kernels of PyTorch that read or write memory without a look at what they are given.
// Graphs that autograd makes give them what they want; those of files need not.
#pragma once

#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace torch_ort::ops {

// The arguments of one call by their names.
class KernelCall;

// Raises UserError if the call would leave its memory. Named in the row of its operator.
using KernelCheck = void (*)(const KernelCall& call);

void check_attention_backward(const KernelCall& call);
void check_batch_norm_backward(const KernelCall& call);
void check_distance_backward(const KernelCall& call);
void check_group_norm(const KernelCall& call);
void check_layer_norm_backward(const KernelCall& call);
void check_max_pool_backward(const KernelCall& call);
void check_pairwise_distance(const KernelCall& call);
void check_pairwise_distance_backward(const KernelCall& call);
void check_softmax_backward(const KernelCall& call);
void check_transform(const KernelCall& call);
void check_weight_norm(const KernelCall& call);
void check_weight_norm_backward(const KernelCall& call);

// The check of an operator, if its row has one. `stack` holds the arguments of a call.
void check_kernel_arguments(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack);

}  // namespace torch_ort::ops
