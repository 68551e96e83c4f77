// The table of sessions by id, and their construction. Their calls are in forward.cpp.
#include "run/session.h"

#include "base/error.h"
#include "run/arena.h"
#include "run/counters.h"
#include "run/delivery.h"
#include "run/partial_backward.h"

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

Session::Session(std::shared_ptr<const CompiledGraph> graph)
    : compiled_(std::move(graph)), delivery_(std::make_shared<Delivery>()) {}

std::shared_ptr<Session> Session::compile_body(std::unique_ptr<ir::Graph> graph,
                                               const Constants& constants,
                                               const SessionOptions& options) {
  return std::shared_ptr<Session>(new Session(compile_graph(std::move(graph), constants, options)));
}

std::shared_ptr<Session> Session::compile(std::unique_ptr<ir::Graph> graph,
                                          const Constants& constants,
                                          const SessionOptions& options) {
  std::shared_ptr<Session> session = compile_body(std::move(graph), constants, options);
  session->last_defined_ = first_expected(*session->compiled_);
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

}  // namespace torch_ort::run
