// Checks of the arguments of PyTorch kernels that access memory without checking them. Graphs that
// autograd makes pass valid arguments; those of files may not.
#pragma once

#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace torch_ort::ops {

// The arguments of one call by their names.
class KernelCall;

// Throws UserError if the call would access memory outside of its arguments. The row of an operator
// names its check.
using KernelCheck = void (*)(const KernelCall& call);

void check_attention_backward(const KernelCall& call);
void check_batch_norm(const KernelCall& call);
void check_batch_norm_backward(const KernelCall& call);
void check_distance_backward(const KernelCall& call);
void check_group_norm(const KernelCall& call);
void check_layer_norm_backward(const KernelCall& call);
void check_rms_norm_backward(const KernelCall& call);
void check_max_pool_backward(const KernelCall& call);
void check_pairwise_distance(const KernelCall& call);
void check_pairwise_distance_backward(const KernelCall& call);
void check_softmax_backward(const KernelCall& call);
void check_transform(const KernelCall& call);
void check_weight_norm(const KernelCall& call);
void check_weight_norm_backward(const KernelCall& call);

// Runs the check of an operator if its row has one. `stack` holds the arguments of the call.
void check_kernel_arguments(const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack);

}  // namespace torch_ort::ops
