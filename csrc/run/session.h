// A compiled graph, ready to run.
//
// Session  what does not depend on sizes: calls, steps, which tensors cross from forward to
// backward. Binding  one set of sizes: the plan, and every argument that sizes decide. Cached,
// least recently used. Context  one forward call and its backward: the tensors. Pooled; ended by
// its token.
#pragma once

#include "ir/graph.h"
#include "ops/op.h"
#include "plan/plan.h"
#include "region/codegen.h"
#include "run/step.h"

#include <ATen/core/Tensor.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

struct SessionOptions {
  bool reorder = true;
  bool in_place = true;
  bool place_parts = true;  // of concatenations
  // Graph outputs that are gradients of leaf parameters: these may leave in engine memory.
  std::vector<int> parameter_gradients;
  bool verify = false;  // check every plan, the sizes of inputs, and those of every result
  bool spoil = false;   // fill memory with garbage before results are written into it
  // Nothing that the types and attributes of the graph say is believed; wants `verify` as well.
  bool is_from_file = false;
  // Values of the forward half that are there when backward begins, whether it reads them or not;
  // by name.
  std::vector<std::string> keep;
  size_t max_bindings = 64;  // sizes, and sets of outputs with gradients, that are remembered
  region::CodegenOptions regions;
  // What runs a region: its kernel, that and the nodes of its body to compare with, or these alone.
  enum class RegionMode : uint8_t { kKernel, kChecked, kNodes } region_mode = RegionMode::kKernel;
};

struct Binding;
struct Context;
struct Delivery;
struct ExpectedBackward;
class PartialBackward;
class SharedBuffer;

// What a slot is, whatever the sizes.
struct SlotFacts {
  const ir::Value* value = nullptr;
  int root = -1;      // the slot whose memory it shares; itself if none
  int producer = -1;  // step
  bool late =
      false;  // size known only when its step has run, or on another device than the session's
  bool leaves = false;    // its memory is given to the caller
  bool is_input = false;  // graph input, or gradient of an output
  bool is_constant = false;
  bool crosses = false;  // written or given in forward, read in backward
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  using Tensors = std::vector<at::Tensor>;  // undefined: None

  // Takes the graph. `constants`: tensors of initializers that hold no data of their own, by name.
  // Raises Unsupported if an operator is missing.
  static std::shared_ptr<Session> compile(
      std::unique_ptr<ir::Graph> graph,
      const std::unordered_map<std::string, at::Tensor>& constants, const SessionOptions& options);
  // The body of an If or a Loop, which no counter and no id tells.
  static std::shared_ptr<Session> compile_body(
      std::unique_ptr<ir::Graph> graph,
      const std::unordered_map<std::string, at::Tensor>& constants, const SessionOptions& options);
  ~Session();

  int64_t id() const { return id_; }
  const ir::Graph& graph() const { return *graph_; }
  bool is_training() const { return yield_ != nullptr; }
  // Inputs, and forward outputs, that backward reads: autograd saves them, not the engine.
  const std::vector<int>& saved_inputs() const { return saved_inputs_; }
  const std::vector<int>& saved_outputs() const { return saved_outputs_; }
  const std::vector<std::pair<int, at::Tensor>>& constants() const { return constants_; }
  const Step& step(int index) const { return steps_[index]; }
  bool writes_inputs() const { return !mutated_inputs_.empty(); }
  bool is_saved_output(int slot) const;
  const ir::Value* slot_value(int slot) const { return facts_[slot].value; }
  bool is_late_slot(int slot) const { return facts_[slot].late; }
  size_t num_outputs() const { return output_slots_.size(); }
  size_t num_gradients() const { return gradient_slots_.size(); }
  size_t num_tangents() const { return tangent_slots_.size(); }
  c10::Device device() const { return device_; }
  bool verifies() const { return options_.verify; }
  bool spoils() const { return options_.spoil; }
  bool is_from_file() const { return options_.is_from_file; }

  // Without a YieldOp: outputs. With one: outputs, then the token.
  // `symbols`: values of graph().symbol_inputs. `carry`: the token holds all bytes that backward
  // needs, so that saved-tensor hooks may copy and move it.
  Tensors forward(const Tensors& inputs, const std::vector<int64_t>& symbols, bool carry);
  // As part of a call of another session, whose thread state it runs in.
  Tensors run_body(const Tensors& inputs, const std::vector<int64_t>& symbols);
  // `saved`: the saved inputs, then the saved outputs. `keep`: the token may be used again. Where a
  // tangent is undefined, so are the gradients that depend on such alone.
  static Tensors backward(const at::Tensor& token, const Tensors& saved, const Tensors& tangents,
                          bool keep);

  // Makes the plan for the sizes that another session has run with last, without running; raises as
  // forward would, and UserError if the other has not run.
  void prepare_like(const Session& other);
  // One report of the plan used last, for explain(); nothing before the first. So too of one that
  // is made for the outputs which got gradients last.
  struct PlanReport {
    int64_t steps_forward, steps_backward, steps_out, steps_functional, steps_view, in_place;
    int64_t context_bytes, scratch_bytes, saved_bytes, peak_bytes;
    double plan_ms;
  };
  std::optional<PlanReport> plan_report() const;
  struct StepReport {
    std::string name, op, form, origin;
    bool backward;
  };
  std::vector<StepReport> steps_report() const;
  // Where each tensor of the plan used last lives; empty before the first.
  struct TensorReport {
    std::string name, kind, area;
    int64_t offset, bytes;
    int first_step, last_step;        // positions in the order of execution; -1: no step uses it
    std::string shares, in_place_of;  // names; empty: no other tensor
  };
  std::vector<TensorReport> plan_table() const;
  // The kernels of regions in the plan used last: name of the node, instructions.
  std::vector<std::pair<std::string, std::string>> programs_report() const;
  void free_idle_contexts();

 private:
  friend struct Binding;
  friend struct Context;
  friend class Binder;
  friend class Describer;
  friend class PartialBackward;
  friend class PartPlacer;
  Session() = default;

  // Size known only when its step has run, or memory on another device than the session's.
  bool is_late(const ir::Value& value) const;
  void lower_graph();
  void keep_for_backward();
  void copy_views_that_leave();
  void assign_slots();
  void resolve_steps(const std::unordered_map<std::string, at::Tensor>& constants);
  void check_symbols() const;
  void find_lifetimes();
  std::shared_ptr<Binding> binding_of_serial(int64_t serial) const;
  std::shared_ptr<SharedBuffer> lend_context_memory(const Binding& binding) const;
  Tensors run_whole_backward(Context& context, bool keep) const;
  Tensors run_expected_backward(Context& context, const Tensors& tangents, bool keep) const;
  std::shared_ptr<const PartialBackward> partial_backward(const std::vector<bool>& defined,
                                                          const Context& context) const;
  void expect(const std::vector<bool>& defined) const;
  // Nothing where all outputs are expected to get gradients.
  std::shared_ptr<const ExpectedBackward> expected_backward() const;
  std::shared_ptr<const ExpectedBackward> make_expected_backward() const;
  std::unordered_map<std::string, at::Tensor> constants_by_name() const;
  std::shared_ptr<const Session> expected_session() const;
  std::shared_ptr<Context> begin_forward(const Tensors& inputs,
                                         const std::vector<int64_t>& symbols);
  Tensors run_forward_half(Context& context) const;
  Tensors collect_outputs(Context& context) const;
  void refuse_writing_into_copies(const Tensors& inputs) const;
  at::Tensor make_carrying_token(const Context& context) const;
  static std::unique_ptr<Context> unpack_carrying_token(const at::Tensor& token);
  std::shared_ptr<Binding> binding_for(const Tensors& inputs, const std::vector<int64_t>& symbols);
  std::shared_ptr<Binding> make_binding(const Tensors& inputs, const std::vector<int64_t>& symbols);

  int64_t id_ = 0;
  std::unique_ptr<ir::Graph> graph_;
  const ir::Node* yield_ = nullptr;
  SessionOptions options_;
  c10::Device device_{c10::kCPU};

  ops::CallList calls_;
  size_t num_forward_ = 0;
  std::vector<ir::Value*> outputs_, gradients_;  // copies of views that leave stand in their place
  Slots slots_;
  std::vector<SlotFacts> facts_;
  std::vector<Step> steps_;
  std::vector<int> input_slots_, tangent_slots_, output_slots_, gradient_slots_;
  std::vector<int> mutated_inputs_;  // their version counters are bumped
  std::vector<std::pair<int, at::Tensor>> constants_;
  std::vector<int> saved_inputs_, saved_outputs_;
  std::set<std::string> bound_symbols_;  // known when a call begins
  bool has_late_values_ = false;
  std::shared_ptr<Delivery> delivery_;

  mutable std::mutex mutex_;                      // of what follows
  std::list<std::shared_ptr<Binding>> bindings_;  // most recently used first
  // By which tangents are defined, as many as there may be bindings.
  mutable std::map<std::vector<bool>, std::shared_ptr<const PartialBackward>> partial_backwards_;
  mutable std::map<std::vector<bool>, std::shared_ptr<const ExpectedBackward>> expected_backwards_;
  mutable std::vector<bool> last_defined_;  // those of the last backward; empty: all
};

// Whether a context's token, by its value, is alive.
bool is_live(int64_t token);

// Frees idle contexts of all sessions, and idle memory; gives the bytes that went back.
int64_t empty_cache();

std::shared_ptr<Session> find_session(int64_t id);  // UserError if it is gone

}  // namespace torch_ort::run
