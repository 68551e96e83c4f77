#include "optim/optimizer.h"

#include "base/error.h"
#include "cpu/update.h"
#include "run/dtype.h"

#include <cmath>
#include <string>

namespace torch_ort::optim {

namespace {

template <typename Rule>
cpu::Update<Rule> make_update(const Tensors& operands, const Rule& rule) {
  cpu::Update<Rule> update{.count = operands[0].numel(), .rule = rule};
  for (size_t i = 0; i < operands.size(); ++i) {
    // Nothing writes to gradients.
    void* const data =
        i == 1 ? const_cast<void*>(operands[i].const_data_ptr()) : operands[i].mutable_data_ptr();
    update.arrays.push_back({data, run::dtype(operands[i].scalar_type())});
    if (i != 1) note_edit(operands[i]);
  }
  return update;
}

template <typename Rule>
std::vector<int64_t> update_by(const RuledTensors& tensors, const std::vector<Rule>& rules,
                               cpu::Isa isa) {
  const size_t count = tensors.parameters.size();
  check_length("gradients", tensors.gradients.size(), count);
  check_length("means", tensors.means.size(), count);
  check_length("means of squares", tensors.squares.size(), count);
  check_length("numbers of rules", tensors.rule_of.size(), count);
  std::vector<cpu::Update<Rule>> updates;
  std::vector<int64_t> left;
  for (size_t i = 0; i < count; ++i) {
    const auto rule = static_cast<size_t>(tensors.rule_of[i]);
    if (rule >= rules.size()) {
      throw UserError(concat("optimizer step: number of a rule: got ", tensors.rule_of[i],
                             ", want one of ", rules.size()));
    }
    const Tensors operands = {tensors.parameters[i], tensors.gradients[i], tensors.means[i],
                              tensors.squares[i]};
    if (have_one_layout(operands, at::kCPU)) {
      updates.push_back(make_update(operands, rules[rule]));
    } else {
      left.push_back(static_cast<int64_t>(i));
    }
  }
  cpu::run(updates, isa);
  return left;
}

}  // namespace

std::vector<int64_t> sgd_step(const Tensors& parameters, const Tensors& gradients,
                              const Tensors& buffers, const std::vector<uint8_t>& is_first,
                              cpu::SgdRule rule, cpu::Isa isa) {
  const bool has_momentum = rule.momentum != 0;
  const size_t count = parameters.size();
  check_length("gradients", gradients.size(), count);
  check_length("momentum buffers", buffers.size(), has_momentum ? count : 0);
  check_length("flags of first steps", is_first.size(), has_momentum ? count : 0);
  std::vector<cpu::Update<cpu::SgdRule>> updates;
  std::vector<int64_t> left;
  for (size_t i = 0; i < count; ++i) {
    Tensors operands = {parameters[i], gradients[i]};
    if (has_momentum) {
      operands.push_back(buffers[i]);
      rule.is_first = is_first[i] != 0;
    }
    if (have_one_layout(operands, at::kCPU)) {
      updates.push_back(make_update(operands, rule));
    } else {
      left.push_back(static_cast<int64_t>(i));
    }
  }
  cpu::run(updates, isa);
  return left;
}

std::vector<int64_t> adam_step(const AdamTensors& tensors, const AdamOptions& options,
                               cpu::Isa isa) {
  const size_t count = tensors.parameters.size();
  check_length("gradients", tensors.gradients.size(), count);
  check_length("means", tensors.means.size(), count);
  check_length("means of squares", tensors.squares.size(), count);
  check_length("largest means of squares", tensors.largest.size(), options.amsgrad ? count : 0);
  check_length("step counts", tensors.steps.size(), count);
  cpu::AdamRule rule{.beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps};
  rule.gradient_factor = options.maximize ? -1 : 1;
  if (options.decoupled_weight_decay) {
    rule.keep = 1 - options.lr * options.weight_decay;
  } else {
    rule.weight_decay = options.weight_decay;
  }
  std::vector<cpu::Update<cpu::AdamRule>> updates;
  std::vector<int64_t> left;
  // The number of steps that the corrections are for. They are kept because powers are slow, and
  // most parameters have taken equally many steps.
  double corrected_for = 0;
  for (size_t i = 0; i < count; ++i) {
    Tensors operands = {tensors.parameters[i], tensors.gradients[i], tensors.means[i],
                        tensors.squares[i]};
    if (options.amsgrad) operands.push_back(tensors.largest[i]);
    if (!have_one_layout(operands, at::kCPU) || !is_count(tensors.steps[i], at::kCPU)) {
      left.push_back(static_cast<int64_t>(i));
      continue;
    }
    const double taken = count_step(tensors.steps[i]);
    if (taken != corrected_for) {
      corrected_for = taken;
      rule.step_size = options.lr / (1 - std::pow(options.beta1, taken));
      rule.inverse_correction = 1 / std::sqrt(1 - std::pow(options.beta2, taken));
    }
    updates.push_back(make_update(operands, rule));
  }
  cpu::run(updates, isa);
  return left;
}

std::vector<int64_t> adam_update(const RuledTensors& tensors,
                                 const std::vector<cpu::AdamRule>& rules, cpu::Isa isa) {
  return update_by(tensors, rules, isa);
}

std::vector<int64_t> lamb_update(const RuledTensors& tensors,
                                 const std::vector<cpu::LambRule>& rules, cpu::Isa isa) {
  return update_by(tensors, rules, isa);
}

SumOfSquares sum_squares(const Tensors& tensors, cpu::Isa isa) {
  SumOfSquares result;
  std::vector<cpu::Numbers> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& each = tensors[i];
    if (!have_one_layout({each}, at::kCPU)) {
      result.left.push_back(static_cast<int64_t>(i));
      continue;
    }
    // Nothing writes to it.
    void* const data = const_cast<void*>(each.const_data_ptr());
    all.push_back({{data, run::dtype(each.scalar_type())}, each.numel()});
  }
  result.sum = cpu::sum_squares(all, isa);
  return result;
}

}  // namespace torch_ort::optim
