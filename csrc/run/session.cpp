// What a session knows before it sees a size. Bindings are made in binding.cpp, runs in runner.cpp.
#include "run/session.h"

#include "base/error.h"
#include "base/failpoint.h"
#include "ops/aten.h"
#include "ops/aten_names.h"
#include "ops/control_flow.h"
#include "run/arena.h"
#include "run/context.h"
#include "run/control_flow.h"
#include "run/counters.h"
#include "run/dtype.h"
#include "run/guard.h"
#include "run/out_forms.h"
#include "run/placement.h"
#include "run/spec.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace torch_ort::run {

namespace {

// The call that keeps what a backward half might have read.
constexpr const char* kKeep = "torch_ort::keep";

struct SessionTable {
  std::mutex mutex;
  int64_t next_id = 1;
  std::unordered_map<int64_t, std::weak_ptr<Session>> sessions;
};

SessionTable& session_table() {
  static SessionTable* table = new SessionTable;  // tokens may outlive static destruction
  return *table;
}

// Whether several elements may have one place in memory, as those of an expanded tensor have.
bool repeats_elements(const ir::Type& type) {
  if (!type.strides) return false;
  for (size_t i = 0; i < type.strides->size(); ++i) {
    if ((*type.strides)[i] == ir::Dim(0) && (*type.shape)[i] != ir::Dim(1)) return true;
  }
  return false;
}

at::Tensor tensor_of(const ir::TensorData& data) {
  at::Tensor tensor =
      at::empty(data.shape, at::TensorOptions().dtype(scalar_type(data.dtype)).device(at::kCPU));
  ORT_CHECK(tensor.nbytes() == data.num_bytes, "initializer: got ", data.num_bytes, " bytes, want ",
            tensor.nbytes());
  if (data.num_bytes > 0) std::memcpy(tensor.mutable_data_ptr(), data.bytes, data.num_bytes);
  return tensor;
}

// Data is row-major; what looks at the tensor counts on the strides of its type.
at::Tensor tensor_of(const ir::Value& value) {
  const at::Tensor tensor = tensor_of(*value.data);
  if (!value.type.strides) return tensor;
  const auto no_symbols = [](const std::string&) -> std::optional<int64_t> { return std::nullopt; };
  const std::vector<int64_t> strides = eval_dims(*value.type.strides, no_symbols);
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

// The device that the program runs on: that of the first value which is not on the CPU.
c10::Device device_of(const ir::Graph& graph) {
  for (const ir::Value& value : graph.values) {
    if (value.type.device.kind != "cpu") return torch_device(value.type.device);
  }
  return c10::Device(c10::kCPU);
}

void collect_symbols(const ir::Type& type, std::vector<std::string>& names) {
  if (type.shape) {
    for (const ir::Dim& dim : *type.shape) dim.collect_symbols(names);
  }
  if (type.strides) {
    for (const ir::Dim& dim : *type.strides) dim.collect_symbols(names);
  }
}

// Symbols whose value is known when a call begins.
std::set<std::string> bound_symbols(const ir::Graph& graph) {
  std::set<std::string> bound(graph.symbol_inputs.begin(), graph.symbol_inputs.end());
  for (const ir::Value* input : graph.inputs) {
    if (!input->type.shape) continue;
    for (const ir::Dim& dim : *input->type.shape) {
      if (dim.is_symbol()) bound.insert(dim.name());
    }
  }
  return bound;
}

bool makes_alias(const Step& step) {
  return step.form == Form::kView || step.form == Form::kReshape;
}

// The argument that result `index` of a mutation is; -1 if the result is memory of its own.
int mutated_slot(const Step& step, size_t index) {
  const auto& returns = step.op->schema().returns();
  if (index >= step.num_returns) {
    const size_t which = index - step.num_returns;
    return which < step.mutates.size() ? step.mutates[which] : -1;
  }
  const bool is_argument =
      returns[index].alias_info() != nullptr && returns[index].alias_info()->isWrite();
  return is_argument && step.mutates.size() == 1 ? step.mutates[0] : -1;
}

// The slot that a view looks at: its first tensor argument.
int viewed_slot(const Step& step) {
  for (const ArgSource& arg : step.args) {
    if (arg.kind == ArgSource::Kind::kSlot) return arg.slots[0];
  }
  throw InternalError(concat("run: view ", step.name, " has no tensor argument"));
}

}  // namespace

std::shared_ptr<Session> Session::compile_body(
    std::unique_ptr<ir::Graph> graph, const std::unordered_map<std::string, at::Tensor>& constants,
    const SessionOptions& options) {
  // Compiling happens while PyTorch traces: constants must be real tensors all the same.
  const RunGuard guard{c10::Device(c10::kCPU)};
  std::shared_ptr<Session> session(new Session);
  session->graph_ = std::move(graph);
  session->options_ = options;
  session->device_ = device_of(*session->graph_);
  session->delivery_ = std::make_shared<Delivery>();
  session->bound_symbols_ = bound_symbols(*session->graph_);
  may_fail("lower");
  session->lower_graph();
  session->keep_for_backward();
  session->copy_views_that_leave();
  session->assign_slots();
  for (const ir::Value* value : session->graph_->initializers) {
    const int slot = session->slots_.at(value);
    if (auto given = constants.find(value->name); given != constants.end()) {
      session->constants_.emplace_back(slot, given->second.detach());
    } else if (value->data) {
      session->constants_.emplace_back(slot, tensor_of(*value));
    } else {
      throw UserError(concat("initializer '", value->name, "': no data was given"));
    }
  }
  session->resolve_steps(constants);
  if (options.is_from_file) session->check_symbols();
  session->find_lifetimes();
  return session;
}

std::shared_ptr<Session> Session::compile(
    std::unique_ptr<ir::Graph> graph, const std::unordered_map<std::string, at::Tensor>& constants,
    const SessionOptions& options) {
  std::shared_ptr<Session> session = compile_body(std::move(graph), constants, options);
  counters().graphs_compiled.fetch_add(1);
  for (const ir::Node& node : session->graph_->nodes) {
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

bool Session::is_late(const ir::Value& value) const {
  if (!value.type.is_known()) return true;
  if (torch_device(value.type.device).type() != device_.type()) return true;
  std::vector<std::string> symbols;
  collect_symbols(value.type, symbols);
  return std::any_of(symbols.begin(), symbols.end(),
                     [&](const std::string& name) { return bound_symbols_.count(name) == 0; });
}

void Session::lower_graph() {
  for (const ir::Node& node : graph_->nodes) {
    if (!node.is_erased() && ir::is(&node, "YieldOp", ir::kMicrosoftDomain)) yield_ = &node;
  }
  calls_ = ops::lower(*graph_, num_forward_);
  for (ops::Call& call : calls_.calls) {
    if (!is_placeable(call.op)) continue;
    for (ir::Value*& value : call.outputs) {
      // A gradient that was not asked for: nothing is known of it, and there is nothing.
      if (value != nullptr && !value->type.is_known() && value->uses.empty()) value = nullptr;
    }
  }
  prefer_out_forms(calls_, device_.is_cpu(), num_forward_,
                   [this](const ir::Value* value) { return is_late(*value); });
  if (yield_ != nullptr) {
    outputs_ = yield_->inputs;
    if (std::count(outputs_.begin(), outputs_.end(), nullptr) > 0) {
      throw UserError(concat("YieldOp '", yield_->name, "': got an input that is left out"));
    }
    gradients_ = graph_->outputs;
  } else {
    outputs_ = graph_->outputs;
  }
}

void Session::keep_for_backward() {
  if (options_.keep.empty()) return;
  const std::set<std::string> names(options_.keep.begin(), options_.keep.end());
  std::vector<ir::Value*> values;
  for (ir::Value& value : graph_->values) {
    if (names.contains(value.name)) values.push_back(&value);
  }
  ORT_CHECK(values.size() == names.size(), "run: got ", values.size(), " values to keep, want ",
            names.size());
  ops::Call call{kKeep, "", {}, {}};
  for (ir::Value* value : values) call.args.emplace_back(value);
  calls_.calls.insert(calls_.calls.begin() + static_cast<std::ptrdiff_t>(num_forward_),
                      std::move(call));
}

// Autograd gives an output that looks at a saved value a version counter of its own, so that an
// edit of it in place would go unnoticed; and memory of the engine must not leave at all. Such a
// view is copied.
void Session::copy_views_that_leave() {
  std::unordered_map<const ir::Value*, const ir::Value*> base;  // of views, transitively
  std::unordered_map<const ir::Value*, size_t> made_by;
  const auto root_of = [&](const ir::Value* value) {
    auto found = base.find(value);
    return found == base.end() ? value : found->second;
  };
  const auto is_tensor = [](const ops::Arg& arg) {
    return std::holds_alternative<ir::Value*>(arg.value);
  };
  const auto first_tensor = [&](const ops::Call& call) {
    const auto found = std::find_if(call.args.begin(), call.args.end(), is_tensor);
    return found == call.args.end() ? nullptr : std::get<ir::Value*>(found->value);
  };
  for (size_t i = 0; i < calls_.calls.size(); ++i) {
    const ops::Call& call = calls_.calls[i];
    for (const ir::Value* value : call.outputs) {
      if (value != nullptr) made_by[value] = i;
    }
    auto op = c10::Dispatcher::singleton().findSchema({call.op, call.overload});
    if (!op) continue;
    if (!ops::gives_view(op->schema())) continue;
    const ir::Value* viewed = first_tensor(call);
    for (const ir::Value* value : call.outputs) {
      if (value != nullptr && viewed != nullptr) base[value] = root_of(viewed);
    }
  }

  std::set<const ir::Value*> read_later;  // roots that backward reads
  for (size_t i = num_forward_; i < calls_.calls.size(); ++i) {
    const std::function<void(const ops::Arg&)> note = [&](const ops::Arg& arg) {
      if (auto* value = std::get_if<ir::Value*>(&arg.value)) read_later.insert(root_of(*value));
      if (auto* list = std::get_if<ops::ArgList>(&arg.value)) {
        for (const ops::Arg& item : *list) note(item);
      }
    };
    for (const ops::Arg& arg : calls_.calls[i].args) note(arg);
  }
  const std::set<const ir::Value*> given(outputs_.begin(), outputs_.end());

  const auto temporary = [&](const ir::Value& like) {
    ir::Value* made = calls_.temporary(like.type);
    made->name = like.name + "_copy";
    return made;
  };
  const auto clone = [&](ir::Value* value, std::vector<ops::Call>& added) {
    ir::Value* copied = temporary(*value);
    // What is written has a place of its own for each element.
    if (repeats_elements(copied->type)) copied->type.strides = std::nullopt;
    added.push_back({ops::aten::kClone, "", {value, ops::Arg()}, {copied}, value->producer});
    return copied;
  };
  // A view that repeats elements goes on doing so: what it looks at is copied, and looked at again.
  const auto copy = [&](ir::Value* value, std::vector<ops::Call>& added) {
    std::vector<const ir::Value*> views;
    if (repeats_elements(value->type) && !repeats_elements(root_of(value)->type)) {
      for (; root_of(value) != value; value = first_tensor(calls_.calls[made_by.at(value)])) {
        views.push_back(value);
      }
    }
    ir::Value* copied = clone(value, added);
    for (auto view = views.rbegin(); view != views.rend(); ++view) {
      ops::Call again = calls_.calls[made_by.at(*view)];
      *std::find_if(again.args.begin(), again.args.end(), is_tensor) = copied;
      for (ir::Value*& output : again.outputs) {
        ir::Value* made = output != nullptr ? temporary(*output) : nullptr;
        if (output == *view) copied = made;
        output = made;
      }
      added.push_back(std::move(again));
    }
    return copied;
  };
  std::vector<ops::Call> forward_copies, backward_copies;
  if (yield_ != nullptr) {
    for (ir::Value*& value : outputs_) {
      const ir::Value* root = root_of(value);
      if (root == value || made_by.count(root) == 0) continue;
      if (read_later.count(root) == 0 || given.count(root) > 0) continue;
      value = copy(value, forward_copies);
    }
  }
  // Made before the border, or an input of the user: a gradient must be nobody else's memory.
  const auto is_forward_memory = [&](const ir::Value* root) {
    auto made = made_by.find(root);
    if (made != made_by.end()) return made->second < num_forward_;
    return root->producer == nullptr;
  };
  for (ir::Value*& value : gradients_) {
    if (!is_forward_memory(root_of(value))) continue;
    value = copy(value, backward_copies);
  }
  auto& calls = calls_.calls;
  calls.insert(calls.end(), backward_copies.begin(), backward_copies.end());
  calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(num_forward_), forward_copies.begin(),
               forward_copies.end());
  num_forward_ += forward_copies.size();
}

void Session::assign_slots() {
  const auto add = [this](const ir::Value* value) {
    if (value == nullptr || slots_.count(value) > 0) return;
    slots_[value] = static_cast<int>(facts_.size());
    SlotFacts facts;
    facts.value = value;
    facts.root = static_cast<int>(facts_.size());
    facts_.push_back(facts);
  };
  for (const ir::Value* input : graph_->inputs) {
    add(input);
    facts_[slots_.at(input)].is_input = true;
    input_slots_.push_back(slots_.at(input));
  }
  for (const ir::Value* value : graph_->initializers) {
    add(value);
    facts_[slots_.at(value)].is_constant = true;
  }
  if (yield_ != nullptr) {
    for (const ir::Value* tangent : yield_->outputs) {
      add(tangent);
      if (tangent == nullptr) continue;
      facts_[slots_.at(tangent)].is_input = true;
      tangent_slots_.push_back(slots_.at(tangent));
    }
  }
  for (const ops::Call& call : calls_.calls) {
    for (const ir::Value* value : call.outputs) add(value);
  }
  // Constants made by lowering: temporaries with data that no call writes.
  for (const ir::Value& value : calls_.temporaries) {
    if (!value.data || slots_.count(&value) > 0) continue;
    add(&value);
    facts_.back().is_constant = true;
    constants_.emplace_back(static_cast<int>(facts_.size()) - 1, tensor_of(*value.data));
  }
  for (const ir::Value* value : outputs_) output_slots_.push_back(slots_.at(value));
  for (const ir::Value* value : gradients_) gradient_slots_.push_back(slots_.at(value));

  for (SlotFacts& facts : facts_) {
    facts.late = !facts.is_input && !facts.is_constant && is_late(*facts.value);
    has_late_values_ = has_late_values_ || facts.late;
  }
}

void Session::resolve_steps(const std::unordered_map<std::string, at::Tensor>& constants) {
  Resolver resolver(slots_, device_.is_cpu());
  steps_.reserve(calls_.calls.size());
  for (const ops::Call& call : calls_.calls) {
    const bool late =
        std::any_of(call.outputs.begin(), call.outputs.end(),
                    [&](const ir::Value* v) { return v != nullptr && facts_[slots_.at(v)].late; });
    const ir::Node* node = call.node;
    const bool is_control_flow = node != nullptr && ops::is_closed(*node);
    Step step = is_control_flow    ? resolver.bind_control_flow(call)
                : call.op == kKeep ? resolver.bind_keep(call)
                : late             ? resolver.resolve_functional(call)
                                   : resolver.resolve(call);
    if (is_control_flow) {
      step.control_flow = std::make_shared<const ControlFlow>(*node, constants, options_);
    }
    step.name = node != nullptr ? node->name : call.op;
    step.origin = node != nullptr ? node->origin : "";
    if (node != nullptr) step.binds_symbol = ir::string_attr(node->attrs, "binds_symbol", "");
    has_late_values_ = has_late_values_ || !step.binds_symbol.empty();
    step.effect = step.effect || (node != nullptr && !ops::is_pure(*node));
    const int index = static_cast<int>(steps_.size());
    for (int slot : step.outputs) {
      if (slot < 0) continue;
      facts_[slot].producer = index;
      if (makes_alias(step)) facts_[slot].root = facts_[viewed_slot(step)].root;
    }
    if (step.form == Form::kMutation) {
      for (size_t i = 0; i < step.outputs.size(); ++i) {
        const int written = mutated_slot(step, i);
        if (step.outputs[i] >= 0 && written >= 0)
          facts_[step.outputs[i]].root = facts_[written].root;
      }
    }
    steps_.push_back(std::move(step));
  }
}

// Each symbol that a step evaluates has a value by then: from the inputs, or from a result of an
// earlier step.
void Session::check_symbols() const {
  std::set<std::string> bound = bound_symbols_;
  const auto check = [&bound](const Step& step, const ir::Dim& dim) {
    std::vector<std::string> names;
    dim.collect_symbols(names);
    for (const std::string& name : names) {
      if (bound.contains(name)) continue;
      throw UserError(concat("run: ", step.op_name(), " of node '", step.name, "': symbol '", name,
                             "': got no value, want one of an input or of an earlier result"));
    }
  };
  for (const Step& step : steps_) {
    for (const ArgSource& arg : step.args) {
      for (const ir::Dim& dim : arg.dims) check(step, dim);
    }
    if (!step.binds_symbol.empty()) bound.insert(step.binds_symbol);
    for (int slot : step.outputs) {
      if (slot < 0 || !facts_[slot].value->type.shape) continue;
      for (const ir::Dim& dim : *facts_[slot].value->type.shape) {
        if (dim.is_symbol()) bound.insert(dim.name());
      }
    }
  }
}

void Session::find_lifetimes() {
  for (int slot : output_slots_) facts_[facts_[slot].root].leaves = true;
  for (int slot : gradient_slots_) facts_[facts_[slot].root].leaves = true;
  for (size_t i = 0; i < steps_.size(); ++i) {
    for (int slot : steps_[i].mutates) {
      const int root = facts_[slot].root;
      const auto input = std::find(input_slots_.begin(), input_slots_.end(), root);
      if (input == input_slots_.end()) continue;
      const int index = static_cast<int>(input - input_slots_.begin());
      if (std::find(mutated_inputs_.begin(), mutated_inputs_.end(), index) ==
          mutated_inputs_.end()) {
        mutated_inputs_.push_back(index);
      }
    }
    if (i < num_forward_) continue;
    for (int slot : steps_[i].reads()) {
      SlotFacts& facts = facts_[slot];
      const bool given_before = facts.is_input && slot < static_cast<int>(input_slots_.size());
      if (given_before ||
          (facts.producer >= 0 && facts.producer < static_cast<int>(num_forward_))) {
        facts.crosses = true;
      }
    }
  }
  for (size_t i = 0; i < input_slots_.size(); ++i) {
    if (facts_[input_slots_[i]].crosses) saved_inputs_.push_back(static_cast<int>(i));
  }
  if (!is_training()) return;
  for (size_t i = 0; i < output_slots_.size(); ++i) {
    const int slot = output_slots_[i];
    const bool first = std::find(output_slots_.begin(), output_slots_.begin() + i, slot) ==
                       output_slots_.begin() + static_cast<std::ptrdiff_t>(i);
    if (facts_[slot].crosses && !facts_[slot].is_input && first) {
      saved_outputs_.push_back(static_cast<int>(i));
    }
  }
  // A view that crosses may look at an engine's value only: the pass replay_views redoes the others
  // after the border, from the tensor that autograd saves.
  for (const SlotFacts& facts : facts_) {
    const SlotFacts& root = facts_[facts.root];
    const bool is_view = &root != &facts;
    ORT_CHECK(!(facts.crosses && is_view && (root.is_input || root.leaves)), "run: value '",
              facts.value->name, "' crosses the border as a view of '", root.value->name,
              "', which the caller holds");
  }
}

}  // namespace torch_ort::run
