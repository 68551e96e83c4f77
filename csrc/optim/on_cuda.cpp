#include "optim/on_cuda.h"

#include "base/error.h"
#include "run/dtype.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

namespace torch_ort::optim {

namespace {

using cuda::StepSettings;

void check(const CudaOperands& operands, size_t num_settings) {
  const size_t count = operands.parameters.size();
  check_length("gradients", operands.gradients.size(), count);
  for (const Tensors& each : operands.states) check_length("states", each.size(), count);
  check_length("numbers of settings", operands.settings_of.size(), count);
  if (!operands.steps.empty()) {
    check_length("step counts", operands.steps.size(), count);
    check_length("settings", num_settings, 1);
  }
  if (!operands.is_first.empty()) {
    check_length("flags of first steps", operands.is_first.size(), count);
  }
  for (int64_t each : operands.settings_of) {
    if (each >= 0 && static_cast<size_t>(each) < num_settings) continue;
    throw UserError(
        concat("optimizer step: number of settings: got ", each, ", want one of ", num_settings));
  }
}

// The parameter and its states, which the step writes.
Tensors written_of(const CudaOperands& operands, size_t i) {
  Tensors written = {operands.parameters[i]};
  for (const Tensors& each : operands.states) written.push_back(each[i]);
  return written;
}

bool takes(const CudaOperands& operands, size_t i) {
  const at::Tensor& parameter = operands.parameters[i];
  const at::Tensor& gradient = operands.gradients[i];
  const Tensors written = written_of(operands, i);
  const bool are_together = std::all_of(written.begin(), written.end(), [&](const at::Tensor& t) {
    return t.defined() && t.device() == parameter.device();
  });
  Tensors all = written;
  all.push_back(gradient);
  return are_together && have_one_layout(written, at::kCUDA) && gradient.defined() &&
         gradient.device() == parameter.device() && gradient.layout() == at::kStrided &&
         gradient.sizes() == parameter.sizes() && !at::isTensorSubclassLike(gradient) &&
         have_dtypes(all);
}

// A step on one device, with the tensors that it needs until it is queued.
class StepOnDevice {
 public:
  StepOnDevice(cuda::OptimizerRule rule, const CudaOperands& operands,
               const std::vector<CudaSettings>& settings, c10::Device device)
      : operands_(operands), device_(device) {
    step_.rule = rule;
    for (const CudaSettings& each : settings) of_groups_.push_back(numbers_of(each));
    if (!operands.steps.empty()) return;
    for (size_t i = 0; i < settings.size(); ++i) {
      step_.settings.push_back(of_groups_[i]);
      cuda::StepSlot slot{.settings = static_cast<uint32_t>(i)};
      if (settings[i].taken.defined()) count_at(slot, settings[i].taken);
      step_.slots.push_back(slot);
    }
  }

  void add(size_t i) {
    const at::Tensor& parameter = operands_.parameters[i];
    cuda::SteppedTensor tensor{.count = parameter.numel(), .slot = slot_of(i)};
    const auto put = [&](const at::Tensor& array, void* data) {
      const auto at = static_cast<size_t>(tensor.num_arrays++);
      tensor.arrays[at] = data;
      tensor.dtypes[at] = run::dtype(array.scalar_type());
    };
    const Tensors written = written_of(operands_, i);
    put(parameter, parameter.mutable_data_ptr());
    const at::Tensor gradient = in_layout_of(parameter, operands_.gradients[i]);
    // Nothing writes to gradients.
    put(gradient, const_cast<void*>(gradient.const_data_ptr()));
    for (size_t j = 1; j < written.size(); ++j) put(written[j], written[j].mutable_data_ptr());
    for (const at::Tensor& each : written) edited_.push_back(each);
    tensor.is_first = !operands_.is_first.empty() && operands_.is_first[i] != 0;
    step_.tensors.push_back(tensor);
  }

  void use(const CudaGradients& gradients, CudaOutcome& outcome) {
    cuda::GradientUse& use = step_.gradients;
    use.scale = gradients.scale;
    use.looks = gradients.looks;
    if (gradients.scale_at.defined()) use.scale_at = number_at(gradients.scale_at, at::kFloat);
    if (gradients.found_inf.defined()) use.found_inf = number_at(gradients.found_inf, at::kFloat);
    if (gradients.max_norm) use.max_norm = *gradients.max_norm;
    if (gradients.looks) {
      outcome.norm = at::empty({}, at::TensorOptions(device_).dtype(at::kDouble));
      use.norm = outcome.norm.mutable_data_ptr();
    }
    if (gradients.decides()) {
      outcome.skipped = at::empty({}, at::TensorOptions(device_).dtype(at::kBool));
      use.skipped = outcome.skipped.mutable_data_ptr();
    }
  }

  void prepare() const { cuda::prepare(step_, device_.index()); }

  void run() const {
    cuda::run(step_, device_.index());
    for (const at::Tensor& each : edited_) note_edit(each);
    for (const at::Tensor& each : counted_) count_step(each);
  }

 private:
  const void* number_at(const at::Tensor& tensor, at::ScalarType dtype) {
    held_.push_back(tensor.to(device_, dtype, /*non_blocking=*/true));
    return held_.back().const_data_ptr();
  }

  StepSettings numbers_of(const CudaSettings& settings) {
    StepSettings numbers = settings.numbers;
    if (!settings.lr.defined()) return numbers;
    if (settings.lr.device().is_cpu()) {
      numbers.lr = settings.lr.item<double>();
    } else {
      numbers.lr_is_double = settings.lr.scalar_type() == at::kDouble;
      numbers.lr_at = number_at(settings.lr, numbers.lr_is_double ? at::kDouble : at::kFloat);
    }
    return numbers;
  }

  void count_at(cuda::StepSlot& slot, const at::Tensor& taken) {
    slot.taken_at = taken.mutable_data_ptr();
    slot.taken_is_double = taken.scalar_type() == at::kDouble;
    edited_.push_back(taken);
  }

  uint32_t slot_of(size_t i) {
    if (operands_.steps.empty()) return static_cast<uint32_t>(operands_.settings_of[i]);
    const at::Tensor& steps = operands_.steps[i];
    const auto next = static_cast<uint32_t>(step_.slots.size());
    if (steps.is_cuda()) {
      if (step_.settings.empty()) step_.settings.push_back(of_groups_[0]);
      step_.slots.emplace_back();
      count_at(step_.slots.back(), steps);
      return next;
    }
    counted_.push_back(steps);
    const double taken = count_of(steps) + 1;
    const auto [found, is_new] = slots_by_count_.try_emplace(taken, next);
    if (is_new) {
      step_.slots.push_back({.settings = static_cast<uint32_t>(step_.settings.size())});
      step_.settings.push_back(of_groups_[0]);
      step_.settings.back().taken = taken;
    }
    return found->second;
  }

  at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& gradient) {
    if (is_dense(gradient, at::kCUDA) && gradient.strides() == parameter.strides()) return gradient;
    at::Tensor copy = at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options());
    held_.push_back(copy.copy_(gradient));
    return held_.back();
  }

  const CudaOperands& operands_;
  c10::Device device_;
  cuda::MultiStep step_;
  std::vector<StepSettings> of_groups_;
  std::map<double, uint32_t> slots_by_count_;
  std::deque<at::Tensor> held_;  // the step has their addresses
  // Tensors that kernels write, and those that are counted on the host.
  Tensors edited_, counted_;
};

}  // namespace

std::vector<int64_t> left_by_cuda(const CudaOperands& operands) {
  std::vector<int64_t> left;
  for (size_t i = 0; i < operands.parameters.size(); ++i) {
    if (!takes(operands, i)) left.push_back(static_cast<int64_t>(i));
  }
  return left;
}

CudaOutcome step_on_cuda(cuda::OptimizerRule rule, const CudaOperands& operands,
                         const std::vector<CudaSettings>& settings,
                         const CudaGradients& gradients) {
  check(operands, settings.size());
  CudaOutcome outcome;
  std::map<c10::DeviceIndex, StepOnDevice> steps;
  // All counts must be in the same place: on the host, or on the device of the first one.
  std::optional<bool> counts_there;
  for (size_t i = 0; i < operands.parameters.size(); ++i) {
    bool is_taken = takes(operands, i);
    const c10::Device device = operands.parameters[i].device();
    if (is_taken && !operands.steps.empty()) {
      const at::Tensor& count = operands.steps[i];
      const bool is_there = is_count(count, at::kCUDA) && count.device() == device;
      is_taken = (is_there || is_count(count, at::kCPU)) && (is_there || !gradients.decides()) &&
                 counts_there.value_or(is_there) == is_there;
      if (is_taken) counts_there = is_there;
    }
    if (!is_taken) {
      outcome.left.push_back(static_cast<int64_t>(i));
      continue;
    }
    steps.try_emplace(device.index(), rule, operands, settings, device).first->second.add(i);
  }
  if (gradients.decides() && steps.size() > 1) {
    throw UserError(concat("optimizer step: got parameters on ", steps.size(),
                           " devices, want one where a device decides"));
  }
  for (auto& [index, step] : steps) {
    step.use(gradients, outcome);
    // This succeeds on all devices, or nothing runs.
    if (steps.size() > 1) step.prepare();
  }
  for (auto& [index, step] : steps) step.run();
  return outcome;
}

}  // namespace torch_ort::optim
