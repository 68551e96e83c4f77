// One optimizer step over many tensors of a GPU at once. One kernel computes the rules of the step,
// from numbers that may be on the device. Then one kernel for each combination of dtypes updates
// all tensors. The formulas are those of cpu/kernels.h; their text is optimizer.cuh.
//
// All inputs of the step may be on the device: the scale, infinities, learning rates and step
// counts. So nothing waits for the device, and a CUDA graph can contain the step. Settings are
// arguments, so new ones need no compilation. Addresses are too many for arguments
// (device_words.h).
#pragma once

#include "ir/type.h"

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torch_ort::cuda {

enum class OptimizerRule : uint8_t { kSgd, kAdam, kLamb };
// From "sgd", "adam" or "lamb"; UserError otherwise.
OptimizerRule optimizer_rule_from_name(std::string_view name);

// The settings of a group of tensors.
struct StepSettings {
  // Where the weight decay of Adam is applied: to the gradient (for LAMB, to the direction), or to
  // the parameter before or after its update.
  enum class Decay : uint8_t { kGradient, kBefore, kAfter };

  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, momentum = 0, dampening = 0;
  double ratio_min = -std::numeric_limits<double>::infinity();
  double ratio_max = std::numeric_limits<double>::infinity();
  double taken = 0;         // steps taken, including this one
  bool corrects = false;    // bias correction for means that started at 0
  bool plain_root = false;  // eps is added to the root without bias correction
  bool maximize = false, nesterov = false;
  Decay decay = Decay::kGradient;
  // A float32 or float64 on the device that replaces lr; nullptr: none.
  const void* lr_at = nullptr;
  bool lr_is_double = false;
};

// The tensors of one group whose steps are counted together.
struct StepSlot {
  uint32_t settings = 0;
  // A step count on the device, float32 or float64, which replaces that of the settings and to
  // which 1 is added.
  void* taken_at = nullptr;
  bool taken_is_double = false;
};

// The arrays of one parameter: the parameter, its gradient (only read), and its states. SGD has a
// buffer if there is momentum. Adam has the mean, the mean of squares and, with amsgrad, the
// largest mean of squares; LAMB has the first two. All have the same number of elements in the same
// order in memory.
struct SteppedTensor {
  std::array<void*, 5> arrays = {};
  std::array<ir::DType, 5> dtypes = {};  // all float64, or each float32, bfloat16 or float16
  int num_arrays = 0;
  int64_t count = 0;
  uint32_t slot = 0;
  // The first step, in which the gradient becomes the momentum buffer.
  bool is_first = false;
};

// How all gradients are used. Addresses are on the device.
struct GradientUse {
  double scale = 1;                // gradients are divided by it
  const void* scale_at = nullptr;  // or by this float32
  // A float32. If it is not 0, nothing is updated or counted.
  const void* found_inf = nullptr;
  // Whether the norm is computed. If it is not finite, nothing is updated or counted.
  bool looks = false;
  // The limit for the norm of the unscaled gradients, which are scaled down to it; needs `looks`.
  // Negative: no limit.
  double max_norm = -1;
  void* norm = nullptr;     // receives the norm of the unscaled gradients, a float64
  void* skipped = nullptr;  // receives a byte: whether the update was skipped
};

struct MultiStep {
  OptimizerRule rule = OptimizerRule::kAdam;
  std::vector<StepSettings> settings;
  std::vector<StepSlot> slots;  // in the order of their settings
  std::vector<SteppedTensor> tensors;
  GradientUse gradients;
};

// Compiles the kernels of a step. Throws Unsupported if there is no driver, or if a text does not
// compile.
void prepare(const MultiStep& step, int device);
// Prepares the step and queues it on the current stream.
void run(const MultiStep& step, int device);

// The names and texts of the kernels for tensors of these dtypes, for tests of their machine code.
std::vector<std::pair<std::string, std::string>> optimizer_texts(
    OptimizerRule rule, const std::vector<ir::DType>& dtypes);

}  // namespace torch_ort::cuda
