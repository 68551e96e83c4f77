// Optimizer steps over all parameters at once on GPUs, by the kernels of cuda/optimizer.h.
#pragma once

#include "cuda/optimizer.h"
#include "optim/operands.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_ort::optim {

// The settings of a parameter group. Settings that the device reads are tensors.
struct CudaSettings {
  cuda::StepSettings numbers;
  // A number on any device that replaces numbers.lr; undefined: it does not.
  at::Tensor lr;
  at::Tensor taken;  // how many steps the group has taken; the step adds 1
};

// What a step reads and writes. Each list has one element for each parameter; the last two may be
// empty.
struct CudaOperands {
  Tensors parameters, gradients;
  std::vector<Tensors> states;       // one list for each state; see cuda::SteppedTensor
  std::vector<int64_t> settings_of;  // indices into the settings
  // How many steps each parameter has taken; the step adds 1. Only with a single settings entry.
  Tensors steps;
  std::vector<uint8_t> is_first;  // whether the momentum buffer is still empty
};

// How all gradients are used; see cuda::GradientUse.
struct CudaGradients {
  double scale = 1;
  at::Tensor scale_at, found_inf;  // undefined: none
  bool looks = false;
  std::optional<double> max_norm;

  // Whether the device decides if parameters are updated.
  bool decides() const { return found_inf.defined() || looks; }
};

struct CudaOutcome {
  std::vector<int64_t> left;  // indices of the parameters that were not updated
  // If gradients are inspected: their norm before clipping in float64, and whether the update was
  // skipped. Both are on the device, and the host does not wait for them.
  at::Tensor norm, skipped;
};

// The indices of the parameters that the kernels cannot update: those on other devices or of other
// dtypes, those with gaps in memory, those with a state of another layout, and those whose gradient
// is not strided. A gradient of another layout is copied by the step.
std::vector<int64_t> left_by_cuda(const CudaOperands& operands);

// Takes one step. If the device decides whether to update, parameters whose step count is elsewhere
// are left out; UserError if the others are on several devices. Throws Unsupported, before it
// changes anything, if there is no driver or a kernel does not compile.
CudaOutcome step_on_cuda(cuda::OptimizerRule rule, const CudaOperands& operands,
                         const std::vector<CudaSettings>& settings, const CudaGradients& gradients);

}  // namespace torch_ort::optim
