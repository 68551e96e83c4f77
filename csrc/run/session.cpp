// The table of sessions by id, their construction, and their forward calls.
#include "run/session.h"

#include "base/error.h"
#include "run/calls.h"
#include "run/counters.h"
#include "run/guard.h"
#include "run/memory/arena.h"
#include "run/memory/delivery.h"

#include <unordered_map>

namespace torch_ort::run {

namespace {

struct SessionTable {
  std::mutex mutex;
  int64_t next_id = 1;
  std::unordered_map<int64_t, std::weak_ptr<Session>> sessions;
};

SessionTable& session_table() {
  // Never destroyed, because tokens may outlive static variables.
  static SessionTable* table = new SessionTable;
  return *table;
}

}  // namespace

Session::Session(std::shared_ptr<PlannedGraph> graph)
    : whole_(whole_variant(std::move(graph))),
      expected_(first_expected(compiled())),
      followed_(whole_) {}

std::shared_ptr<Session> Session::compile(std::unique_ptr<ir::Graph> graph,
                                          const Constants& constants,
                                          const SessionOptions& options) {
  std::shared_ptr<Session> session(
      new Session(std::make_shared<PlannedGraph>(std::move(graph), constants, options)));
  counters().graphs_compiled.fetch_add(1);
  for (const ir::Node& node : session->graph().nodes) {
    if (node.is_erased()) continue;
    counters().nodes.fetch_add(1);
    if (node.op.domain == ir::kAtenDomain) counters().nodes_aten.fetch_add(1);
  }
  SessionTable& table = session_table();
  std::lock_guard lock(table.mutex);
  session->id_ = table.next_id++;
  table.sessions[session->id_] = session;
  return session;
}

Session::~Session() {
  SessionTable& table = session_table();
  std::lock_guard lock(table.mutex);
  table.sessions.erase(id_);
}

std::shared_ptr<Session> find_session(int64_t id) {
  SessionTable& table = session_table();
  std::lock_guard lock(table.mutex);
  auto found = table.sessions.find(id);
  std::shared_ptr<Session> session = found == table.sessions.end() ? nullptr : found->second.lock();
  if (session == nullptr) {
    throw UserError(concat("session ", id,
                           ": it is gone (was torch.compiler.reset() called between ",
                           "compiling and running?)"));
  }
  return session;
}

int64_t empty_cache() {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    SessionTable& table = session_table();
    std::lock_guard lock(table.mutex);
    for (auto& [id, weak] : table.sessions) {
      if (auto session = weak.lock()) sessions.push_back(std::move(session));
    }
  }
  for (auto& session : sessions) session->free_idle_contexts();
  return free_idle_buffers();
}

void Session::free_idle_contexts() {
  std::lock_guard lock(mutex_);
  whole_->graph->free_idle_contexts();
  for (const auto& [key, variant] : variants_) {
    if (variant->graph != nullptr) variant->graph->free_idle_contexts();
  }
}

std::shared_ptr<const Variant> Session::followed() const {
  std::lock_guard lock(mutex_);
  return followed_;
}

void Session::expect(const std::vector<bool>& defined) {
  std::lock_guard lock(mutex_);
  expected_ = defined;
}

template <typename Make>
std::shared_ptr<const Variant> Session::find_or_make(const Variant::Key& key, Make&& make) {
  const auto found = variants_.find(key);
  if (found != variants_.end()) return found->second;
  if (variants_.size() > compiled().options.max_bindings) variants_.clear();
  return variants_[key] = make();
}

std::shared_ptr<const Variant> Session::follow_expected() {
  std::lock_guard lock(mutex_);
  followed_ =
      expected_ == whole_->key.defined ? whole_ : find_or_make({.defined = expected_}, [this] {
        const auto made = make_variant(*whole_, expected_);
        return made == nullptr ? whole_ : made;
      });
  return followed_;
}

std::shared_ptr<const Variant> Session::half_for(const std::vector<bool>& defined,
                                                 const Context& context) {
  std::lock_guard lock(mutex_);
  return find_or_make({.defined = defined, .is_half = true},
                      [&] { return make_half(*whole_, defined, context); });
}

void Session::prepare_like(const Session& other) {
  const std::shared_ptr<const Variant> theirs = other.followed();
  expect(theirs->key.defined);
  follow_expected()->graph->plan_like(*theirs->graph);
}

void Session::refuse_writing_into_copies(const Tensors& inputs) const {
  for (int index : compiled().mutated_inputs) {
    if (!is_computed_by_reader(inputs[index])) continue;
    throw Unsupported(concat("run: input '", compiled().value(compiled().inputs[index]).name,
                             "': got a conjugate or negative view that the graph writes into, want "
                             "a tensor without these bits"));
  }
}

Session::Tensors Session::forward(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                  bool packs, bool early) {
  const RunEvent event(*this);
  release_dead_memory(is_training());
  Tensors results;
  std::shared_ptr<Context> context;
  {
    const RunGuard guard(device());
    const std::optional<Tensors> numbers = computed(inputs);
    if (numbers) refuse_writing_into_copies(inputs);
    const std::shared_ptr<const Variant> variant = follow_expected();
    context = variant->graph->begin(numbers ? *numbers : inputs, symbols, early && is_training(),
                                    /*may_replay=*/!packs);
    context->called = shared_from_this();
    context->variant = variant;
    results = variant->graph->run_forward_half(*context);
    for (int index : compiled().mutated_inputs) {
      if (!inputs[index].is_inference()) inputs[index].unsafeGetTensorImpl()->bump_version();
    }
    counters().forward_runs.fetch_add(1);
    ++forward_runs_of_thread();
    counters().saved_bytes.store(context->binding->plan.saved_bytes);
    if (!is_training()) return results;
    context->release_all_but_kept();
  }
  results.push_back(make_token(std::move(context), packs));
  return results;
}

}  // namespace torch_ort::run
