#include "region/rounded.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace torch_ort::region {

namespace {

using ir::DType;
using ir::Node;
using ir::Value;
using Kind = ops::FusedForm::Kind;
using ops::Pointwise;

class Finder {
 public:
  explicit Finder(const std::vector<Member>& members) {
    for (const Member& member : members) makers_[member.node->outputs[0]] = &member;
    for (const Member& member : members) {
      for (const Value* value : deciding(member)) round(value);
    }
  }

  std::unordered_set<const Value*> run() { return std::move(rounded_); }

 private:
  // nullptr: the value comes from outside.
  const Member* maker(const Value* value) const {
    const auto found = makers_.find(value);
    return found == makers_.end() ? nullptr : found->second;
  }

  // The operands of which a small difference may change the result by much.
  std::vector<const Value*> deciding(const Member& member) const {
    const std::vector<Value*>& inputs = member.node->inputs;
    if (member.form.kind == Kind::kMax || member.form.kind == Kind::kMin) return {inputs[0]};
    if (member.form.kind != Kind::kPointwise) return {};
    switch (member.form.op) {
      case Pointwise::kEqual:
      case Pointwise::kLess:
      case Pointwise::kLessOrEqual:
      case Pointwise::kGreater:
      case Pointwise::kGreaterOrEqual:
        if (keeps_side(member)) return {};
        return {inputs.begin(), inputs.end()};
      case Pointwise::kFloor:
      case Pointwise::kCeil:
      case Pointwise::kRound:
      case Pointwise::kTrunc: return {inputs[0]};
      case Pointwise::kThresholdGrad:
        if (keeps_side(member)) return {};
        return {inputs[1]};
      case Pointwise::kExp: return difference(inputs[0]);
      default: return {};
    }
  }

  // Whether rounding cannot change on which side of a constant a number is: no bfloat16 is rounded
  // to 0 that a float tells from 0, if it is not denormal. float16 has far fewer exponents.
  static bool keeps_side(const Member& member) {
    const auto is_zero = [](const Value* value) { return ops::known_double(value) == 0.0; };
    const std::vector<Value*>& inputs = member.node->inputs;
    const auto& constants = member.form.constants;
    const bool has_zero = std::any_of(inputs.begin(), inputs.end(), is_zero) ||
                          std::find(constants.begin(), constants.end(), 0.0) != constants.end();
    return has_zero && inputs.back()->type.dtype != DType::kHalf;
  }

  std::vector<const Value*> difference(const Value* value) const {
    const Member* made = maker(value);
    while (made != nullptr && made->form.kind == Kind::kPass) made = maker(made->node->inputs[0]);
    const bool is_one =
        made != nullptr && made->form.kind == Kind::kPointwise && made->form.op == Pointwise::kSub;
    if (!is_one) return {};
    return {made->node->inputs.begin(), made->node->inputs.end()};
  }

  // Notes the value, or what it selects from, or negates: that of rounded numbers is rounded.
  void round(const Value* value) {
    const Member* made = maker(value);
    if (made == nullptr || !ir::is_short_float(value->type.dtype)) return;
    if (!seen_.insert(value).second) return;
    const std::vector<Value*>& inputs = made->node->inputs;
    if (made->form.kind == Kind::kPass && inputs[0]->type.dtype == value->type.dtype) {
      round(inputs[0]);
    } else if (selects(*made)) {
      for (const Value* input : inputs) round(input);
    } else if (is_computed(*made)) {
      rounded_.insert(value);
    }
  }

  // Results of other kinds are read from memory, or are sums that only leave the region.
  static bool is_computed(const Member& member) {
    return member.form.kind == Kind::kPass || member.form.kind == Kind::kPointwise ||
           member.form.is_reduction();
  }

  static bool selects(const Member& member) {
    if (member.form.kind != Kind::kPointwise || !member.form.constants.empty()) return false;
    switch (member.form.op) {
      case Pointwise::kCopy:
      case Pointwise::kNeg:
      case Pointwise::kAbs:
      case Pointwise::kRelu:
      case Pointwise::kMax:
      case Pointwise::kMin:
      case Pointwise::kWhere: return true;
      default: return false;
    }
  }

  std::unordered_map<const Value*, const Member*> makers_;
  std::unordered_set<const Value*> seen_, rounded_;
};

}  // namespace

std::unordered_set<const Value*> rounded_values(const std::vector<Member>& members) {
  return Finder(members).run();
}

}  // namespace torch_ort::region
