// Evaluates the types for one set of sizes, and decides what they allow each step: to be a view, or
// to overwrite a result of another step.
#include "run/describe.h"

#include "base/error.h"
#include "run/memory/aligned_products.h"
#include "run/memory/padded_rows.h"
#include "run/memory/parts.h"

#include <c10/core/MemoryFormat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace torch_ort::run {

class Describer {
 public:
  Describer(const CompiledGraph& graph, const ir::SymbolLookup& lookup,
            GradientReturn gradient_return)
      : graph_(graph), lookup_(lookup), gradient_return_(gradient_return) {}

  Description run(const std::vector<TensorSpec>& inputs) {
    evaluate_types(inputs);
    share_memory();
    take_over_adopted();
    lay_out();
    choose_delivered();
    describe_program();
    return std::move(result_);
  }

 private:
  void evaluate_types(const std::vector<TensorSpec>& inputs) {
    result_.specs.resize(graph_.facts.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      result_.specs[graph_.inputs[i]] = inputs[i];
    }
    for (auto& [slot, tensor] : graph_.constants) result_.specs[slot] = spec_of(tensor);
    for (size_t slot = 0; slot < graph_.facts.size(); ++slot) {
      const SlotFacts& facts = graph_.facts[slot];
      if (result_.specs[slot].known || facts.unbacked || facts.is_constant) continue;
      // A gradient with an unbacked size.
      if (graph_.is_unbacked(*facts.value)) continue;
      result_.specs[slot] = spec_of(*facts.value, lookup_);
      if (graph_.options.is_from_file) check_given_memory(facts, result_.specs[slot]);
    }
  }

  // Kernels that write into given memory assume a dense block: a product with other strides would
  // write beyond it. For graphs from files nothing else checks the strides.
  void check_given_memory(const SlotFacts& facts, const TensorSpec& spec) const {
    if (facts.producer < 0 || !graph_.steps[facts.producer]->writes_given_memory()) return;
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

  // Decides whose memory each result shares. It depends on sizes and strides whether a reshape is a
  // view.
  void share_memory() {
    result_.roots.resize(graph_.facts.size());
    std::iota(result_.roots.begin(), result_.roots.end(), 0);
    for (const auto& step : graph_.steps) step->describe(graph_, result_);
  }

  // Lets a point-wise step overwrite the result of a kernel if it is its only reader. There must be
  // no other reader, because the planner could order that one after the step. Both must be in the
  // same half, because a value that crosses is needed again if the graph is kept.
  void take_over_adopted() {
    result_.taken_over.assign(graph_.steps.size(), -1);
    if (!graph_.options.in_place) return;
    std::vector<int> readers(graph_.facts.size(), 0);
    for (const auto& step : graph_.steps) {
      if (step->is_view()) continue;
      for (int slot : step->reads()) ++readers[result_.roots[slot]];
    }
    for (size_t i = 0; i < graph_.steps.size(); ++i) {
      const Step& step = *graph_.steps[i];
      const std::vector<int> candidates = step.in_place();
      if (candidates.empty() || !step.writes_given_memory()) continue;
      const int result = step.outputs[0];
      if (leaves(result) || result_.roots[result] != result) continue;
      for (int slot : candidates) {
        if (readers[result_.roots[slot]] != 1 || result_.roots[slot] != slot ||
            !may_be_overwritten(slot, i))
          continue;
        const TensorSpec &from = result_.specs[slot], &to = result_.specs[result];
        if (from.sizes != to.sizes || from.strides != to.strides || from.dtype != to.dtype)
          continue;
        result_.taken_over[i] = slot;
        result_.roots[result] = slot;
        for (int& root : result_.roots) {
          // These are views of the result.
          if (root == result) root = slot;
        }
        break;
      }
    }
  }

  bool leaves(int slot) const {
    const auto shares = [&](int other) { return result_.roots[other] == result_.roots[slot]; };
    return std::any_of(graph_.outputs.begin(), graph_.outputs.end(), shares) ||
           std::any_of(graph_.gradients.begin(), graph_.gradients.end(), shares);
  }

  bool may_be_overwritten(int slot, size_t step) const {
    const SlotFacts& facts = graph_.facts[slot];
    if (facts.producer < 0 || facts.unbacked || leaves(slot) || !result_.specs[slot].known)
      return false;
    const size_t border = graph_.num_forward;
    const bool same_half = (static_cast<size_t>(facts.producer) < border) == (step < border);
    const TensorSpec& spec = result_.specs[slot];
    const auto numel =
        std::accumulate(spec.sizes.begin(), spec.sizes.end(), int64_t{1}, std::multiplies<>());
    const bool dense = spec.bytes == numel * static_cast<int64_t>(c10::elementSize(spec.dtype));
    return same_half && dense && graph_.steps[facts.producer]->gives_up_results();
  }

  // Gives memory that only steps see other strides and places.
  void lay_out() {
    const RootUses uses(graph_, result_);
    const bool aligns = graph_.device.is_cuda() && graph_.options.products;
    if (aligns) RowPadder(graph_, result_, uses).run();
    PartPlacer placer(graph_, result_, uses);
    if (graph_.options.place_parts) placer.run();
    if (aligns) ProductAligner(graph_, result_, uses).run();
  }

  // Chooses the gradients to deliver: each must be the only output in its memory, and cover all of
  // it.
  void choose_delivered() {
    const std::vector<int>& gradients = graph_.gradients;
    result_.delivered.assign(gradients.size(), -1);
    is_delivered_.assign(graph_.facts.size(), false);
    if (!gradient_return_.deliver || !graph_.device.is_cpu()) return;
    std::vector<int> num_leaving(graph_.facts.size(), 0);
    for (int slot : graph_.outputs) ++num_leaving[result_.roots[slot]];
    for (int slot : gradients) ++num_leaving[result_.roots[slot]];
    for (int index : graph_.options.parameter_gradients) {
      const int slot = gradients.at(index), root = result_.roots[slot];
      if (num_leaving[root] != 1 || !is_made_in_backward(root) || !covers(slot, root)) continue;
      result_.delivered[index] = root;
      is_delivered_[root] = true;
    }
  }

  bool is_made_in_backward(int slot) const {
    const SlotFacts& facts = graph_.facts[slot];
    return facts.producer >= static_cast<int>(graph_.num_forward) &&
           graph_.steps[facts.producer]->writes_given_memory();
  }

  bool covers(int slot, int root) const {
    const TensorSpec &part = result_.specs[slot], &whole = result_.specs[root];
    return part.known && whole.known && whole.bytes > 0 && part.bytes == whole.bytes &&
           part.dtype == whole.dtype;
  }

  plan::Kind kind_of(size_t slot) const {
    const SlotFacts& facts = graph_.facts[slot];
    if (facts.is_input) return plan::Kind::kInput;
    if (facts.is_constant) return plan::Kind::kConstant;
    if (facts.producer < 0) return plan::Kind::kInput;
    if (!graph_.steps[facts.producer]->writes_given_memory()) return plan::Kind::kAdopted;
    return leaves_[slot] && !is_delivered_[slot] ? plan::Kind::kOutput : plan::Kind::kPlanned;
  }

  void describe_program() {
    leaves_.assign(graph_.facts.size(), false);
    for (int slot : graph_.outputs) leaves_[result_.roots[slot]] = true;
    for (int slot : graph_.gradients) leaves_[result_.roots[slot]] = true;
    for (size_t slot = 0; slot < graph_.facts.size(); ++slot) {
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
    for (const auto& [root, bytes] : result_.tails) result_.program.tensors[root].bytes += bytes;
    for (const auto& step : graph_.steps) {
      plan::Step planned;
      planned.reads = step->reads();
      for (int slot : step->outputs) {
        if (slot >= 0) planned.writes.push_back(slot);
      }
      const size_t index = result_.program.steps.size();
      if (step->writes_given_memory() && result_.taken_over[index] < 0)
        planned.in_place = in_place_candidates(*step);
      planned.effect = step->effect;
      planned.workspace = step->takes_workspace();
      planned.workspace_bytes = workspace_bytes(*step);
      // passes/overlap_collectives has put work between it and its wait.
      if (step->goes_on()) {
        (index < graph_.num_forward ? result_.program.keeps_forward_order
                                    : result_.program.keeps_backward_order) = true;
      }
      result_.program.steps.push_back(std::move(planned));
    }
    result_.program.num_forward = static_cast<int>(graph_.num_forward);
    result_.program.outputs = graph_.outputs;
    result_.program.gradients = graph_.gradients;
    result_.program.gradients_leave_early = gradient_return_.early;
  }

  // The memory that a convolution allocates for itself. For channels-last images it copies only the
  // weights, to their layout and to one of its own. -1: not known.
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

  // The operands that the result may overwrite. The planner requires that they cover their memory
  // exactly.
  std::vector<int> in_place_candidates(const Step& step) const {
    std::vector<int> candidates;
    for (int slot : step.in_place()) {
      const TensorSpec& to = result_.specs[step.outputs[0]];
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

  const CompiledGraph& graph_;
  const ir::SymbolLookup& lookup_;
  GradientReturn gradient_return_;
  std::vector<bool> leaves_, is_delivered_;  // by slot
  Description result_;
};

Description describe(const CompiledGraph& graph, const std::vector<TensorSpec>& inputs,
                     const ir::SymbolLookup& lookup, GradientReturn gradient_return) {
  return Describer(graph, lookup, gradient_return).run(inputs);
}

}  // namespace torch_ort::run
