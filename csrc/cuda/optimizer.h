// One step of an optimizer over many tensors of a GPU at once: a kernel works out what is done,
// from numbers that may lie on the device, and one kernel for each combination of dtypes does it to
// all tensors. The formulas are those of cpu/kernels.h; optimizer.cuh has their text.
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
// UserError unless it is sgd, adam or lamb.
OptimizerRule optimizer_rule_from_name(std::string_view name);

// What a group of tensors follows.
struct StepSettings {
  // Where the decay of Adam acts: on the gradient (in LAMB on the direction), or on the parameter
  // before or after its update.
  enum class Decay : uint8_t { kGradient, kBefore, kAfter };

  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, momentum = 0, dampening = 0;
  double ratio_min = -std::numeric_limits<double>::infinity();
  double ratio_max = std::numeric_limits<double>::infinity();
  double taken = 0;         // steps, with this one
  bool corrects = false;    // for means that began at 0
  bool plain_root = false;  // eps stands beside the root that is not corrected
  bool maximize = false, nesterov = false;
  Decay decay = Decay::kGradient;
  const void* lr_at = nullptr;  // a float32 or float64 on the device, in the place of lr
  bool lr_is_double = false;
};

// Tensors of one group that are counted together.
struct StepSlot {
  uint32_t settings = 0;
  void* taken_at = nullptr;  // a count on the device to which the step is added, in the place of
  bool taken_is_double = false;  // their settings'; float32 or float64
};

// A parameter, its gradient, which is only read, and states: for SGD a buffer if there is momentum,
// for Adam mean, mean of squares and, for amsgrad, the largest of these, for LAMB the first two.
// All hold as many elements, in the same order in memory.
struct SteppedTensor {
  std::array<void*, 5> arrays = {};
  std::array<ir::DType, 5> dtypes = {};  // all float64, or each float32, bfloat16 or float16
  int num_arrays = 0;
  int64_t count = 0;
  uint32_t slot = 0;
  bool is_first = false;  // the gradient becomes the momentum buffer, whatever that holds
};

// What holds for all gradients. Addresses are those of the device.
struct GradientUse {
  double scale = 1;                 // they are divided by it,
  const void* scale_at = nullptr;   // or by a float32
  const void* found_inf = nullptr;  // a float32: if it is not 0 nothing is updated or counted
  bool looks = false;               // at their norm: nothing is either if that is not finite
  double max_norm = -1;             // of the unscaled gradients, which are shortened to it; needs
                                    // `looks`; below 0: no limit
  void* norm = nullptr;             // a float64: where the norm goes, unscaled
  void* skipped = nullptr;          // a byte: whether nothing was updated
};

struct MultiStep {
  OptimizerRule rule = OptimizerRule::kAdam;
  std::vector<StepSettings> settings;
  std::vector<StepSlot> slots;  // in the order of their settings
  std::vector<SteppedTensor> tensors;
  GradientUse gradients;
};

// Builds what a step needs. Unsupported if there is no driver, or a text does not build.
void prepare(const MultiStep& step, int device);
// Prepares the step, and queues it on the stream in force.
void run(const MultiStep& step, int device);

// The texts by their names, for tests of their machine code: for tensors of these dtypes.
std::vector<std::pair<std::string, std::string>> optimizer_texts(
    OptimizerRule rule, const std::vector<ir::DType>& dtypes);

}  // namespace torch_ort::cuda
