// Evaluates the types of one set of sizes, and decides what they let each step do: be a view, write
// into what another step made.
#include "run/describe.h"

#include "base/error.h"
#include "ops/aten.h"
#include "run/parts.h"

#include <ATen/TensorUtils.h>
#include <c10/core/MemoryFormat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace torch_ort::run {

class Describer {
 public:
  Describer(const Session& session, const ir::SymbolLookup& lookup, bool deliver)
      : session_(session), lookup_(lookup), deliver_(deliver) {}

  Description run(const std::vector<TensorSpec>& inputs) {
    evaluate_types(inputs);
    decide_forms();
    take_over_adopted();
    place_parts();
    choose_delivered();
    describe_program();
    return std::move(result_);
  }

 private:
  void evaluate_types(const std::vector<TensorSpec>& inputs) {
    result_.specs.resize(session_.facts_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      result_.specs[session_.input_slots_[i]] = inputs[i];
    }
    for (auto& [slot, tensor] : session_.constants_) result_.specs[slot] = spec_of(tensor);
    for (size_t slot = 0; slot < session_.facts_.size(); ++slot) {
      const SlotFacts& facts = session_.facts_[slot];
      if (result_.specs[slot].known || facts.late || facts.is_constant) continue;
      if (session_.is_late(*facts.value)) continue;  // a gradient of a size that data tells
      result_.specs[slot] = spec_of(*facts.value, lookup_);
      if (session_.options_.is_from_file) check_given_memory(facts, result_.specs[slot]);
    }
  }

  // Kernels that write into memory given to them count on a block which they fill: with other
  // strides, products for one write beyond it. Nothing else checks what a file says.
  void check_given_memory(const SlotFacts& facts, const TensorSpec& spec) const {
    if (facts.producer < 0 || !session_.steps_[facts.producer].writes_given_memory()) return;
    if (!is_dense(spec)) {
      throw UserError(concat(
          "run: value '", facts.value->name, "': got sizes ", c10::IntArrayRef(spec.sizes),
          " with strides ", c10::IntArrayRef(spec.strides), ", want those of one block of memory"));
    }
    static const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    if (spec.bytes > memory) {
      throw UserError(concat("run: value '", facts.value->name, "': got ", spec.bytes,
                             " bytes, want at most the ", memory, " of this machine"));
    }
  }

  // A Reshape is a view where the strides of what it looks at allow it, else a copy.
  void decide_forms() {
    const size_t count = session_.steps_.size();
    result_.forms.resize(count);
    result_.roots.resize(session_.facts_.size());
    for (size_t slot = 0; slot < result_.roots.size(); ++slot)
      result_.roots[slot] = static_cast<int>(slot);
    for (size_t i = 0; i < count; ++i) {
      const Step& step = session_.steps_[i];
      result_.forms[i] = step.form;
      if (step.form == Form::kMutation) {
        for (int slot : step.outputs) {
          if (slot >= 0 && session_.facts_[slot].root != slot) {
            result_.roots[slot] = result_.roots[session_.facts_[slot].root];
          }
        }
      }
      if (step.form != Form::kView && step.form != Form::kReshape) continue;
      const int base = step.reads().front();
      if (step.form == Form::kReshape) {
        if (!is_view(base, step.outputs[0])) {
          result_.forms[i] = Form::kFunctional;
          continue;
        }
        result_.forms[i] = Form::kView;
      }
      for (int slot : step.outputs) {
        if (slot >= 0) result_.roots[slot] = result_.roots[base];
      }
    }
  }

  // Others count on the strides that the type of a value says. A temporary value of a lowering gets
  // those that the view has.
  bool is_view(int base, int slot) {
    const TensorSpec& from = result_.specs[base];
    TensorSpec& to = result_.specs[slot];
    const SlotFacts& facts = session_.facts_[slot];
    if (!from.known || !to.known || facts.late) return false;
    const auto strides = at::detail::computeStride(
        c10::IntArrayRef(from.sizes), c10::IntArrayRef(from.strides), c10::IntArrayRef(to.sizes));
    if (!strides) return false;
    const bool is_temporary = facts.value->producer == nullptr;
    if (is_temporary) to.strides.assign(strides->begin(), strides->end());
    return same_strides(to.sizes, *strides, to.strides);
  }

  // A point-wise step that is the only reader of a kernel's own result writes into that result.
  // One reader alone, so that no order of the steps can put another after it; and a result of the
  // same half, because what crosses may be needed again when the graph is kept.
  void take_over_adopted() {
    result_.taken_over.assign(session_.steps_.size(), -1);
    if (!session_.options_.in_place) return;
    std::vector<int> readers(session_.facts_.size(), 0);
    for (const Step& step : session_.steps_) {
      for (int slot : step.reads()) {
        if (!is_alias_step(step)) ++readers[result_.roots[slot]];
      }
    }
    for (size_t i = 0; i < session_.steps_.size(); ++i) {
      const Step& step = session_.steps_[i];
      if (step.in_place.empty() || !step.writes_given_memory()) continue;
      const int result = step.outputs[0];
      if (leaves(result) || result_.roots[result] != result) continue;
      for (int slot : step.in_place) {
        if (readers[result_.roots[slot]] != 1 || result_.roots[slot] != slot ||
            !may_be_overwritten(slot, i))
          continue;
        const TensorSpec &from = result_.specs[slot], &to = result_.specs[result];
        if (from.sizes != to.sizes || from.strides != to.strides || from.dtype != to.dtype)
          continue;
        result_.taken_over[i] = slot;
        result_.roots[result] = slot;
        for (int& root : result_.roots) {
          if (root == result) root = slot;  // views of the result
        }
        break;
      }
    }
  }

  static bool is_alias_step(const Step& step) {
    return step.form == Form::kView || step.form == Form::kReshape;
  }

  bool leaves(int slot) const {
    const auto shares = [&](int other) { return result_.roots[other] == result_.roots[slot]; };
    return std::any_of(session_.output_slots_.begin(), session_.output_slots_.end(), shares) ||
           std::any_of(session_.gradient_slots_.begin(), session_.gradient_slots_.end(), shares);
  }

  bool may_be_overwritten(int slot, size_t step) const {
    const SlotFacts& facts = session_.facts_[slot];
    if (facts.producer < 0 || facts.late || leaves(slot) || !result_.specs[slot].known)
      return false;
    const Step& producer = session_.steps_[facts.producer];
    const size_t border = session_.num_forward_;
    const bool same_half = (static_cast<size_t>(facts.producer) < border) == (step < border);
    // A third party's kernel may keep what it gives.
    const bool is_torchs = producer.op && ops::is_pytorchs(producer.op->operator_name().name);
    const TensorSpec& spec = result_.specs[slot];
    const auto numel =
        std::accumulate(spec.sizes.begin(), spec.sizes.end(), int64_t{1}, std::multiplies<>());
    const bool dense = spec.bytes == numel * static_cast<int64_t>(c10::elementSize(spec.dtype));
    return same_half && is_torchs && dense && result_.forms[facts.producer] == Form::kFunctional &&
           producer.form == Form::kFunctional;
  }

  void place_parts() {
    PartPlacer placer(session_, result_);
    if (session_.options_.place_parts) placer.run();
  }

  // Gradients of parameters, for whose memory the engine may wait: each the only one that leaves
  // with its memory, all of which it covers.
  void choose_delivered() {
    const std::vector<int>& gradients = session_.gradient_slots_;
    result_.delivered.assign(gradients.size(), -1);
    is_delivered_.assign(session_.facts_.size(), false);
    if (!deliver_ || !session_.device_.is_cpu()) return;
    std::vector<int> num_leaving(session_.facts_.size(), 0);
    for (int slot : session_.output_slots_) ++num_leaving[result_.roots[slot]];
    for (int slot : gradients) ++num_leaving[result_.roots[slot]];
    for (int index : session_.options_.parameter_gradients) {
      const int slot = gradients.at(index), root = result_.roots[slot];
      if (num_leaving[root] != 1 || !is_made_in_backward(root) || !covers(slot, root)) continue;
      result_.delivered[index] = root;
      is_delivered_[root] = true;
    }
  }

  bool is_made_in_backward(int slot) const {
    const SlotFacts& facts = session_.facts_[slot];
    return facts.producer >= static_cast<int>(session_.num_forward_) &&
           session_.steps_[facts.producer].writes_given_memory();
  }

  bool covers(int slot, int root) const {
    const TensorSpec &part = result_.specs[slot], &whole = result_.specs[root];
    return part.known && whole.known && whole.bytes > 0 && part.bytes == whole.bytes &&
           part.dtype == whole.dtype;
  }

  plan::Kind kind_of(size_t slot) const {
    const SlotFacts& facts = session_.facts_[slot];
    if (facts.is_input) return plan::Kind::kInput;
    if (facts.is_constant) return plan::Kind::kConstant;
    if (facts.producer < 0) return plan::Kind::kInput;
    if (!session_.steps_[facts.producer].writes_given_memory()) return plan::Kind::kAdopted;
    return leaves_[slot] && !is_delivered_[slot] ? plan::Kind::kOutput : plan::Kind::kPlanned;
  }

  void describe_program() {
    leaves_.assign(session_.facts_.size(), false);
    for (int slot : session_.output_slots_) leaves_[result_.roots[slot]] = true;
    for (int slot : session_.gradient_slots_) leaves_[result_.roots[slot]] = true;
    for (size_t slot = 0; slot < session_.facts_.size(); ++slot) {
      plan::Tensor tensor;
      tensor.kind = kind_of(slot);
      tensor.delivered = is_delivered_[slot];
      tensor.bytes = result_.specs[slot].known ? result_.specs[slot].bytes : 0;
      if (result_.roots[slot] != static_cast<int>(slot)) {
        tensor.root = result_.roots[slot];
        tensor.kind = kind_of(static_cast<size_t>(tensor.root));
      }
      result_.program.tensors.push_back(tensor);
    }
    for (const Step& step : session_.steps_) {
      plan::Step planned;
      planned.reads = step.reads();
      for (int slot : step.outputs) {
        if (slot >= 0) planned.writes.push_back(slot);
      }
      const size_t index = result_.program.steps.size();
      if (step.writes_given_memory() && result_.taken_over[index] < 0)
        planned.in_place = in_place_candidates(step);
      planned.effect = step.effect;
      planned.workspace = step.form == Form::kPlaced;
      planned.workspace_bytes = workspace_bytes(step);
      result_.program.steps.push_back(std::move(planned));
    }
    result_.program.num_forward = static_cast<int>(session_.num_forward_);
    result_.program.outputs = session_.output_slots_;
    result_.program.gradients = session_.gradient_slots_;
  }

  // A convolution of images whose channels stand last copies its weights alone, to their layout and
  // to one of its own.
  int64_t workspace_bytes(const Step& step) const {
    const std::vector<int> reads = step.reads();
    if (reads.empty() || !is_channels_last(reads.front())) return -1;
    int64_t bytes = 0;
    for (const std::vector<int>* slots : {&reads, &step.outputs}) {
      for (int slot : *slots) {
        if (slot >= 0 && !is_channels_last(slot)) bytes += result_.specs[slot].bytes;
      }
    }
    return 2 * bytes;
  }

  bool is_channels_last(int slot) const {
    const TensorSpec& spec = result_.specs[slot];
    return spec.known && spec.sizes.size() == 4 &&
           c10::is_channels_last_strides_2d<int64_t>(spec.sizes, spec.strides);
  }

  // The planner needs candidates that cover their memory exactly.
  std::vector<int> in_place_candidates(const Step& step) const {
    std::vector<int> candidates;
    if (step.in_place.empty()) return candidates;
    const TensorSpec& to = result_.specs[step.outputs[0]];
    for (int slot : step.in_place) {
      const TensorSpec& from = result_.specs[slot];
      const TensorSpec& base = result_.specs[result_.roots[slot]];
      const bool same_layout = from.sizes == to.sizes && from.strides == to.strides;
      if ((same_layout || (is_row_major(from) && is_row_major(to))) && from.dtype == to.dtype &&
          from.bytes == to.bytes && from.bytes == base.bytes && base.known) {
        candidates.push_back(slot);
      }
    }
    return candidates;
  }

  const Session& session_;
  const ir::SymbolLookup& lookup_;
  bool deliver_;
  std::vector<bool> leaves_, is_delivered_;  // by slot
  Description result_;
};

Description describe(const Session& session, const std::vector<TensorSpec>& inputs,
                     const ir::SymbolLookup& lookup, bool deliver) {
  return Describer(session, lookup, deliver).run(inputs);
}

}  // namespace torch_ort::run
