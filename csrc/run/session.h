// A compiled graph, ready to run.
//
// CompiledGraph  what does not depend on sizes: steps, and which tensors cross from forward to
//                backward.
// Binding        one set of sizes: the plan, and every argument that sizes decide. Cached, least
//                recently used.
// Context        one forward call and its backward: the tensors. Pooled; ended by its token.
// Session        a compiled graph with its bindings, and the calls of it.
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
  using Tensors = std::vector<at::Tensor>;  // undefined: None

  // Takes the graph, as compile_graph does.
  static std::shared_ptr<Session> compile(std::unique_ptr<ir::Graph> graph,
                                          const Constants& constants,
                                          const SessionOptions& options);
  // The body of an If or a Loop, which no counter and no id tells.
  static std::shared_ptr<Session> compile_body(std::unique_ptr<ir::Graph> graph,
                                               const Constants& constants,
                                               const SessionOptions& options);
  ~Session();

  int64_t id() const { return id_; }
  const CompiledGraph& compiled() const { return *compiled_; }
  const ir::Graph& graph() const { return *compiled_->graph; }
  c10::Device device() const { return compiled_->device; }
  bool is_training() const { return compiled_->yield != nullptr; }
  // Inputs, and forward outputs, that backward reads: autograd saves them, not the engine.
  const std::vector<int>& saved_inputs() const { return compiled_->saved_inputs; }
  const std::vector<int>& saved_outputs() const { return compiled_->saved_outputs; }
  size_t num_outputs() const { return compiled_->outputs.size(); }

  // Without a YieldOp: outputs. With one: outputs, then the token.
  // `symbols`: values of graph().symbol_inputs. `carry`: the token holds all bytes that backward
  // needs, so that saved-tensor hooks may copy and move it.
  // `early`: who waits for gradients gets them as they become ready, by BackwardRun. Where these
  // are few bytes, and where the token carries, they are ready together.
  Tensors forward(const Tensors& inputs, const std::vector<int64_t>& symbols, bool carry,
                  bool early = false);
  // By gradient: in which segment of the backward half the one of a token's call becomes ready,
  // counted from 0. Empty: all are ready together.
  static std::vector<int> segments(const at::Tensor& token);
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
    int64_t segments;  // of the backward half, where gradients leave early; else 1
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
  // The lists of rows that count, which the plan used last has made last: name of the node, how
  // many are in it, and of how many.
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
  std::shared_ptr<SharedBuffer> lend_context_memory(const Binding& binding) const;
  std::shared_ptr<const PartialBackward> partial_backward(const std::vector<bool>& defined,
                                                          const Context& context) const;
  void expect(const std::vector<bool>& defined) const;
  // Nothing where all outputs are expected to get gradients.
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
