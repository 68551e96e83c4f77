// A graph that can be called: a table of variants, by which gradients of its outputs come.
//
// A session of a training graph predicts these: they are those that came in the last backward. A
// forward call follows the plan of the variant for them (variant.h). Other gradients may come all
// the same; they are computed by another variant. The token of a call ends its context.
#pragma once

#include "run/variant.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace torch_ort::run {

class Session : public std::enable_shared_from_this<Session> {
 public:
  using Tensors = PlannedGraph::Tensors;

  static std::shared_ptr<Session> compile(std::unique_ptr<ir::Graph> graph,
                                          const Constants& constants,
                                          const SessionOptions& options);
  ~Session();

  int64_t id() const { return id_; }
  const CompiledGraph& compiled() const { return whole_->graph->compiled(); }
  const ir::Graph& graph() const { return *compiled().graph; }
  c10::Device device() const { return compiled().device; }
  bool is_training() const { return compiled().yield != nullptr; }
  // The inputs, and the forward outputs, that backward reads. Autograd saves these, not the engine.
  const std::vector<int>& saved_inputs() const { return compiled().saved_inputs; }
  const std::vector<int>& saved_outputs() const { return compiled().saved_outputs; }
  size_t num_outputs() const { return compiled().outputs.size(); }

  // Runs the forward half. Returns the outputs, and then, if the graph has a YieldOp, the token of
  // the call. `symbols` are the values of graph().symbol_inputs. With `packs` the active
  // saved-tensor hooks get what the call saves (autograd/packed_call.h). With `early` gradients are
  // returned as they become ready, by a BackwardRun; they are returned together nevertheless if
  // they have few bytes.
  Tensors forward(const Tensors& inputs, const std::vector<int64_t>& symbols, bool packs,
                  bool early = false);
  // By gradient: the segment of the backward half in which it becomes ready, counted from 0, for
  // the call of a token. Empty: all are ready together.
  static std::vector<int> segments(const at::Tensor& token);
  // Runs the backward half. `saved` are the saved inputs, then the saved outputs. With `keep` the
  // token may be used again. A gradient that depends only on undefined tangents is undefined.
  static Tensors backward(const at::Tensor& token, const Tensors& saved, const Tensors& tangents,
                          bool keep);

  // Makes the plan that the last forward call of another session followed, without running. Throws
  // what forward would throw, and UserError if the other session has not run.
  void prepare_like(const Session& other);
  const std::shared_ptr<const Variant>& whole() const { return whole_; }
  // The variant that the last forward call followed.
  std::shared_ptr<const Variant> followed() const;
  void free_idle_contexts();

 private:
  friend class BackwardRun;

  explicit Session(std::shared_ptr<PlannedGraph> graph);

  void expect(const std::vector<bool>& defined);
  // The variant that a forward call follows from here on.
  std::shared_ptr<const Variant> follow_expected();
  // The backward half for these gradients. `context` may be that of any call.
  std::shared_ptr<const Variant> half_for(const std::vector<bool>& defined, const Context& context);
  template <typename Make>
  std::shared_ptr<const Variant> find_or_make(const Variant::Key& key, Make&& make);
  void refuse_writing_into_copies(const Tensors& inputs) const;

  int64_t id_ = 0;
  const std::shared_ptr<const Variant> whole_;

  mutable std::mutex mutex_;  // guards the following members
  // All but the whole. There are at most as many as bindings.
  std::map<Variant::Key, std::shared_ptr<const Variant>> variants_;
  std::vector<bool> expected_;  // by incoming gradient: whether the next call expects it
  std::shared_ptr<const Variant> followed_;
};

// Whether the call of a token, given by the token's value, waits for its backward.
bool is_live(int64_t token);

// Frees the idle contexts of all sessions, and idle memory. Returns the number of bytes that were
// freed.
int64_t empty_cache();

std::shared_ptr<Session> find_session(int64_t id);  // UserError if it is gone

}  // namespace torch_ort::run
