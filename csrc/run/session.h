// A compiled graph that is ready to run.
//
// CompiledGraph  does not depend on sizes: the steps, and which tensors cross from forward to
//               backward
// Binding        one set of sizes: the plan, and the arguments that depend on sizes. Bindings are
//               cached; the least recently used one is dropped.
// Context        the tensors of one forward call and its backward. Contexts are pooled. The token
//               of a call ends its context.
// Session        a compiled graph with its bindings, and the calls of it
#pragma once

#include "run/compiled_graph.h"

#include <ATen/core/Tensor.h>

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_ort::run {

struct Binding;
struct Context;
struct Delivery;
struct ExpectedBackward;
struct Leaving;
class PartialBackward;
class SharedBuffer;

class Session : public std::enable_shared_from_this<Session> {
 public:
  using Tensors = std::vector<at::Tensor>;  // an undefined tensor is None

  // Compiles a graph; see compile_graph.
  static std::shared_ptr<Session> compile(std::unique_ptr<ir::Graph> graph,
                                          const Constants& constants,
                                          const SessionOptions& options);
  // Compiles the body of an If or a Loop. Such a session has no id and is not counted.
  static std::shared_ptr<Session> compile_body(std::unique_ptr<ir::Graph> graph,
                                               const Constants& constants,
                                               const SessionOptions& options);
  ~Session();

  int64_t id() const { return id_; }
  const CompiledGraph& compiled() const { return *compiled_; }
  const ir::Graph& graph() const { return *compiled_->graph; }
  c10::Device device() const { return compiled_->device; }
  bool is_training() const { return compiled_->yield != nullptr; }
  // The inputs, and the forward outputs, that backward reads. Autograd saves these, not the engine.
  const std::vector<int>& saved_inputs() const { return compiled_->saved_inputs; }
  const std::vector<int>& saved_outputs() const { return compiled_->saved_outputs; }
  size_t num_outputs() const { return compiled_->outputs.size(); }

  // Runs the forward half. Returns the outputs, and then, if the graph has a YieldOp, the token of
  // the call.
  // `symbols` are the values of graph().symbol_inputs. With `carry` the token holds all bytes that
  // backward needs, so that saved-tensor hooks may copy and move it. With `early` gradients are
  // returned as they become ready, by a BackwardRun; they are returned together nevertheless if
  // they have few bytes, or if the token carries.
  Tensors forward(const Tensors& inputs, const std::vector<int64_t>& symbols, bool carry,
                  bool early = false);
  // By gradient: the segment of the backward half in which it becomes ready, counted from 0, for
  // the call of a token. Empty: all are ready together.
  static std::vector<int> segments(const at::Tensor& token);
  // Runs as part of a call of another session, in the thread state that the other has set.
  Tensors run_body(const Tensors& inputs, const std::vector<int64_t>& symbols);
  // Runs the backward half. `saved` are the saved inputs, then the saved outputs. With `keep` the
  // token may be used again. A gradient that depends only on undefined tangents is undefined.
  static Tensors backward(const at::Tensor& token, const Tensors& saved, const Tensors& tangents,
                          bool keep);

  // Makes the plan for the sizes with which another session ran last, without running. Throws what
  // forward would throw, and UserError if the other session has not run.
  void prepare_like(const Session& other);
  // A report of the plan that was used last, for explain(); nothing before the first. If a session
  // is made for the outputs that got gradients last (partial_backward.h), the report is about its
  // plan.
  struct PlanReport {
    int64_t steps_forward, steps_backward, steps_out, steps_functional, steps_view, in_place;
    int64_t context_bytes, scratch_bytes, saved_bytes, peak_bytes;
    int64_t segments;  // segments of the backward half; 1 unless gradients leave early
    double plan_ms;
  };
  std::optional<PlanReport> plan_report() const;
  struct StepReport {
    std::string name, op, form, origin;
    bool backward;
  };
  std::vector<StepReport> steps_report() const;
  // The place of each tensor in the plan that was used last; empty before the first.
  struct TensorReport {
    std::string name, kind, area;
    int64_t offset, bytes;
    int first_step, last_step;        // positions in execution order; -1: unused
    std::string shares, in_place_of;  // names of tensors; empty: none
  };
  std::vector<TensorReport> plan_table() const;
  // The kernels of regions in the plan that was used last: name of the node, listing.
  std::vector<std::pair<std::string, std::string>> programs_report() const;
  // The lists of rows that the last run with that plan made: name of the node, the number of rows
  // in the list, and the number of rows in all.
  struct RowListReport {
    std::string name;
    int64_t count, num_rows;
  };
  std::vector<RowListReport> row_lists() const;
  void free_idle_contexts();

 private:
  friend class BackwardRun;

  explicit Session(std::shared_ptr<const CompiledGraph> graph);

  std::shared_ptr<Binding> binding_of_serial(int64_t serial) const;
  void lend_context_memory(Context& context) const;
  std::shared_ptr<const PartialBackward> partial_backward(const std::vector<bool>& defined,
                                                          const Context& context) const;
  void expect(const std::vector<bool>& defined) const;
  // Returns nullptr if all outputs are expected to get gradients.
  std::shared_ptr<const ExpectedBackward> expected_backward() const;
  std::shared_ptr<const Session> expected_session() const;
  std::shared_ptr<Context> begin_forward(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                         bool early);
  Tensors run_forward_half(Context& context) const;
  Tensors collect_outputs(Context& context) const;
  void refuse_writing_into_copies(const Tensors& inputs) const;
  at::Tensor make_carrying_token(const Context& context) const;
  static std::unique_ptr<Context> unpack_carrying_token(const at::Tensor& token);
  std::shared_ptr<Binding> binding_for(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                       bool early);
  std::shared_ptr<Binding> or_without_delivery(std::shared_ptr<Binding> delivering,
                                               const Tensors& inputs,
                                               const std::vector<int64_t>& symbols);
  std::shared_ptr<Binding> find_binding(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                        Leaving leaving);

  int64_t id_ = 0;
  std::shared_ptr<const CompiledGraph> compiled_;
  std::shared_ptr<Delivery> delivery_;

  mutable std::mutex mutex_;                      // guards the following members
  std::list<std::shared_ptr<Binding>> bindings_;  // most recently used first
  // By which tangents are defined. There are at most as many as bindings.
  mutable std::map<std::vector<bool>, std::shared_ptr<const PartialBackward>> partial_backwards_;
  mutable std::map<std::vector<bool>, std::shared_ptr<const ExpectedBackward>> expected_backwards_;
  // Those of the last backward, or what is expected before the first; empty: all.
  mutable std::vector<bool> last_defined_;
  // What the last forward call expected; its backward may have differed.
  mutable std::vector<bool> last_expected_;
};

// Whether the context of a token, given by the token's value, is alive.
bool is_live(int64_t token);

// Frees the idle contexts of all sessions, and idle memory. Returns the number of bytes that were
// freed.
int64_t empty_cache();

std::shared_ptr<Session> find_session(int64_t id);  // UserError if it is gone

}  // namespace torch_ort::run
