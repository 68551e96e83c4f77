// Steps over all parameters at once on GPUs, by kernels of cuda/optimizer.h.
#pragma once

#include "cuda/optimizer.h"
#include "optim/operands.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_ort::optim {

// What a group of parameters follows; numbers that are read on the device stand in the tensors.
struct CudaSettings {
  cuda::StepSettings numbers;
  at::Tensor lr;     // a number on any device, in the place of numbers.lr
  at::Tensor taken;  // how many steps the group took, to which this one is added
};

// What a step reads and writes: lists with an element for each parameter, the last two for all or
// none.
struct CudaOperands {
  Tensors parameters, gradients;
  std::vector<Tensors> states;       // a list for each; see cuda::SteppedTensor
  std::vector<int64_t> settings_of;  // numbers of their settings
  Tensors steps;  // how many were taken, to which this one is added; of one settings
  std::vector<uint8_t> is_first;  // whether the momentum buffer holds nothing
};

// What holds for all gradients; see cuda::GradientUse.
struct CudaGradients {
  double scale = 1;
  at::Tensor scale_at, found_inf;  // undefined: there is none
  bool looks = false;
  std::optional<double> max_norm;

  // Whether the device decides if anything is updated.
  bool decides() const { return found_inf.defined() || looks; }
};

struct CudaOutcome {
  std::vector<int64_t> left;  // indices of the parameters that stay as they are
  // Where gradients are looked at: their norm before clipping, float64, and whether nothing was
  // updated. On the device; nobody waits for them.
  at::Tensor norm, skipped;
};

// Indices of the parameters that no kernel takes: those on other devices or of other dtypes, those
// with holes, with states of another layout, or with gradients that are not strided. Gradients of
// another layout are copied by the step.
std::vector<int64_t> left_by_cuda(const CudaOperands& operands);

// Where the device decides, parameters whose counts lie elsewhere are left, and the others have to
// be on one device. Unsupported, before anything is done, if there is no driver, or a kernel does
// not build.
CudaOutcome step_on_cuda(cuda::OptimizerRule rule, const CudaOperands& operands,
                         const std::vector<CudaSettings>& settings, const CudaGradients& gradients);

}  // namespace torch_ort::optim
