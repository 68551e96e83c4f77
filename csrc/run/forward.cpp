// One training step as autograd sees it: a forward call, a token, a backward call.
#include "base/error.h"
#include "base/failpoint.h"
#include "run/companion.h"
#include "run/context.h"
#include "run/counters.h"
#include "run/guard.h"
#include "run/partial_backward.h"
#include "run/python_op.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace torch_ort::run {

namespace {

// A forward call that waits for its backward.
struct LiveCall {
  std::shared_ptr<Context> context;
  std::shared_ptr<Companion> companion;
};

// By the value of the token.
struct ContextTable {
  std::mutex mutex;
  std::unordered_map<int64_t, LiveCall> calls;
  std::atomic<int64_t> next_token{1};
};

ContextTable& context_table() {
  static ContextTable* table = new ContextTable;  // tokens may be dropped while the process ends
  return *table;
}

// Back to the pool, unless the session or the binding is gone.
void retire(std::unique_ptr<Context> context) noexcept {
  context->clear();
  if (context->failed) return;
  const std::shared_ptr<Session> session = std::move(context->session);
  const std::shared_ptr<const Session> called = std::move(context->called);
  const std::shared_ptr<const ExpectedBackward> expected = std::move(context->expected);
  // Idle contexts do not hold the binding that holds them.
  std::shared_ptr<Binding> binding = std::move(context->binding);
  std::lock_guard lock(binding->mutex);
  binding->idle.push_back(std::move(context));
}

// A context in use; retired at the end of its scope or with its token.
std::shared_ptr<Context> borrow(std::shared_ptr<Session> session, Binding& binding) {
  std::unique_ptr<Context> context = binding.take_context();
  context->session = std::move(session);
  return {context.release(), [](Context* used) { retire(std::unique_ptr<Context>(used)); }};
}

void end_context(int64_t token) noexcept {
  LiveCall call;
  ContextTable& table = context_table();
  {
    std::lock_guard lock(table.mutex);
    auto found = table.calls.find(token);
    if (found == table.calls.end()) return;
    call = std::move(found->second);
    table.calls.erase(found);
  }
  counters().contexts_live.fetch_sub(1);
}

at::Tensor make_token(std::shared_ptr<Context> context) {
  ContextTable& table = context_table();
  const int64_t id = table.next_token.fetch_add(1);
  {
    std::lock_guard lock(table.mutex);
    table.calls[id].context = std::move(context);
  }
  counters().contexts_live.fetch_add(1);
  auto* value = new int64_t(id);
  return at::from_blob(
      value, {1},
      [](void* data) {
        auto* token = static_cast<int64_t*>(data);
        end_context(*token);
        delete token;
      },
      at::TensorOptions().dtype(at::kLong));
}

// Looks at the call of a token under the table's lock.
template <typename Function>
auto with_call(const at::Tensor& token, Function&& function) {
  const int64_t id = *token.const_data_ptr<int64_t>();
  ContextTable& table = context_table();
  std::lock_guard lock(table.mutex);
  auto found = table.calls.find(id);
  TORCH_CHECK(
      found != table.calls.end(), "torch_ort: the saved state of forward call ", id,
      " is gone: its token was copied by a hook that was not active during the forward call, ",
      "or its graph was freed");
  return function(found->second);
}

std::shared_ptr<Context> context_of(const at::Tensor& token) {
  return with_call(token, [](LiveCall& call) { return call.context; });
}

// Whether a token holds all bytes that backward needs; it names no context then.
bool is_carrying(const at::Tensor& token) { return token.scalar_type() == at::kByte; }

// Lent to one half while it runs.
class ScratchLease {
 public:
  ScratchLease(Context& context, int64_t bytes) : context_(context) {
    if (bytes == 0) return;
    memory_ = lend(context.graph().device, bytes);
    context_.attach_scratch(memory_.data());
  }
  ~ScratchLease() { context_.attach_scratch(nullptr); }

 private:
  Context& context_;
  Buffer memory_;
};

// Strides that AOTAutograd promised to whoever reads the result.
at::Tensor with_promised_strides(const at::Tensor& tensor, const TensorSpec& spec) {
  if (!spec.known || !tensor.defined()) return tensor;
  if (tensor.strides() == c10::IntArrayRef(spec.strides) || tensor.numel() == 0) return tensor;
  const bool same = tensor.sizes() == c10::IntArrayRef(spec.sizes) &&
                    same_strides(spec.sizes, tensor.strides(), spec.strides);
  if (same) return tensor;
  if (may_overlap(spec)) {
    throw UserError(concat("run: a result of sizes ", c10::IntArrayRef(spec.sizes),
                           " with strides ", tensor.strides(), ": got the type's strides ",
                           c10::IntArrayRef(spec.strides), ", want a place for each element"));
  }
  at::Tensor copy = make_tensor(spec);
  copy.copy_(tensor);
  return copy;
}

// A gradient that lies in `memory` as a tensor of its own, alone in a storage that keeps the
// memory.
at::Tensor deliver(const at::Tensor& gradient, const Binding& binding, int root,
                   SharedBuffer& memory) {
  const int64_t offset = binding.plan.placements[root].offset, bytes = binding.specs[root].bytes;
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, memory.hand_out(offset, bytes),
      c10::GetAllocator(gradient.device().type()), true));
  ORT_CHECK(storage.data() == gradient.storage().data(), "run: gradient '",
            binding.graph->value(root).name, "' is not where it was planned");
  at::Tensor delivered = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), gradient.key_set(), gradient.dtype());
  delivered.unsafeGetTensorImpl()->set_sizes_and_strides(gradient.sizes(), gradient.strides(),
                                                         gradient.storage_offset());
  counters().gradients_delivered.fetch_add(1, std::memory_order_relaxed);
  return delivered;
}

at::Tensor bytes_over(void* data, int64_t size, c10::Device device) {
  return at::from_blob(data, {size}, at::TensorOptions().dtype(at::kByte).device(device));
}

constexpr int64_t kCarryMagic = 0x746f727463617272;  // "tortcarr"
constexpr int64_t kCarryAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kCarryAlignment - 1) / kCarryAlignment * kCarryAlignment;
}

std::vector<bool> which_are_defined(const Session::Tensors& tensors) {
  std::vector<bool> defined;
  for (const at::Tensor& tensor : tensors) defined.push_back(tensor.defined());
  return defined;
}

bool are_all_true(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), false) == flags.end();
}

// Names the session in profiles: graphs may have equal names of steps.
class RunEvent {
 public:
  explicit RunEvent(const Session& session) {
    if (event_.isActive()) event_.before("torch_ort::session " + std::to_string(session.id()));
  }

 private:
  at::RecordFunction event_{at::RecordScope::FUNCTION};
};

}  // namespace

bool is_live(int64_t token) {
  ContextTable& table = context_table();
  std::lock_guard lock(table.mutex);
  return table.calls.count(token) > 0;
}

void keep_beside(const at::Tensor& token, std::shared_ptr<Companion> companion) {
  if (is_carrying(token)) return;
  with_call(token, [&](LiveCall& call) { call.companion = std::move(companion); });
}

std::shared_ptr<Companion> kept_beside(const at::Tensor& token) {
  if (is_carrying(token)) return nullptr;
  return with_call(token, [](LiveCall& call) { return call.companion; });
}

void Session::free_idle_contexts() {
  std::lock_guard lock(mutex_);
  for (auto& binding : bindings_) {
    std::lock_guard binding_lock(binding->mutex);
    binding->idle.clear();
  }
  for (const auto& step : compiled_->steps) step->free_idle_contexts();
  for (const auto& [defined, partial] : partial_backwards_) partial->free_idle_contexts();
  for (const auto& [defined, expected] : expected_backwards_) {
    if (expected != nullptr) expected->session->free_idle_contexts();
  }
}

std::shared_ptr<Binding> Session::binding_for(const Tensors& inputs,
                                              const std::vector<int64_t>& symbols) {
  const bool deliver = delivery_->is_on;
  {
    std::lock_guard lock(mutex_);
    for (auto found = bindings_.begin(); found != bindings_.end(); ++found) {
      if (!(*found)->matches(inputs, symbols, deliver)) continue;
      bindings_.splice(bindings_.begin(), bindings_, found);
      return bindings_.front();
    }
  }
  std::shared_ptr<Binding> binding = make_binding(compiled_, inputs, symbols, deliver);
  std::lock_guard lock(mutex_);
  bindings_.push_front(binding);
  if (bindings_.size() > compiled_->options.max_bindings) bindings_.pop_back();
  return binding;
}

std::shared_ptr<Binding> Session::binding_of_serial(int64_t serial) const {
  std::lock_guard lock(mutex_);
  for (const auto& binding : bindings_) {
    if (binding->serial == serial) return binding;
  }
  throw UserError(concat("saved-tensor hooks: more than ", compiled_->options.max_bindings,
                         " sizes of one graph wait for their backward"));
}

void Session::prepare_like(const Session& other) {
  std::shared_ptr<Binding> used;
  {
    std::lock_guard lock(other.mutex_);
    if (!other.bindings_.empty()) used = other.bindings_.front();
  }
  if (!used) throw UserError("prepare_like: the other session has not run yet");
  Tensors inputs;
  for (const TensorSpec& spec : used->inputs) {
    inputs.push_back(spec.known
                         ? tensor_over(storage_without_memory(spec.bytes, spec.device), spec, 0)
                         : at::Tensor());
  }
  binding_for(inputs, used->symbol_inputs);
}

std::shared_ptr<SharedBuffer> Session::lend_context_memory(const Binding& binding) const {
  may_fail("memory");
  release_dead_memory(true);
  return std::make_shared<SharedBuffer>(lend(device(), binding.plan.context_bytes),
                                        binding.delivers ? delivery_ : nullptr);
}

Session::Tensors Session::collect_outputs(Context& context) const {
  may_fail("results");
  Tensors results;
  results.reserve(compiled_->outputs.size() + 1);
  for (int slot : compiled_->outputs) {
    at::Tensor tensor = with_promised_strides(context.slots[slot], context.binding->specs[slot]);
    // An input that leaves as an output is another tensor object to autograd.
    if (compiled_->facts[slot].is_input || compiled_->facts[slot].is_constant)
      tensor = at::alias(tensor);
    results.push_back(std::move(tensor));
  }
  return results;
}

std::shared_ptr<Context> Session::begin_forward(const Tensors& inputs,
                                                const std::vector<int64_t>& symbols) {
  std::shared_ptr<Binding> binding = binding_for(inputs, symbols);
  std::shared_ptr<Context> context = borrow(shared_from_this(), *binding);
  if (binding->plan.context_bytes > 0) {
    context->context_memory = lend_context_memory(*binding);
    context->attach_context_memory(context->context_memory->data());
  }
  for (size_t i = 0; i < inputs.size(); ++i) context->slots[compiled_->inputs[i]] = inputs[i];
  return context;
}

Session::Tensors Session::run_forward_half(Context& context) const {
  ScratchLease scratch(context, context.binding->plan.forward_scratch_bytes);
  run_steps(context, context.binding->forward);
  return collect_outputs(context);
}

void Session::refuse_writing_into_copies(const Tensors& inputs) const {
  for (int index : compiled_->mutated_inputs) {
    if (!is_computed_by_reader(inputs[index])) continue;
    throw Unsupported(concat("run: input '", compiled_->value(compiled_->inputs[index]).name,
                             "' is a conjugate or negative view, and is written into"));
  }
}

Session::Tensors Session::run_body(const Tensors& inputs, const std::vector<int64_t>& symbols) {
  return run_forward_half(*begin_forward(inputs, symbols));
}

Session::Tensors Session::forward(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                  bool carry) {
  const RunEvent event(*this);
  release_dead_memory(is_training());
  RunGuard guard(device());
  const std::optional<Tensors> numbers = computed(inputs);
  if (numbers) refuse_writing_into_copies(inputs);
  // A carrying token names one session and its plan.
  const auto expected = carry ? nullptr : expected_backward();
  Session& session = expected ? *expected->session : *this;
  std::shared_ptr<Context> context = session.begin_forward(numbers ? *numbers : inputs, symbols);
  context->called = shared_from_this();
  context->expected = expected;
  const std::shared_ptr<Binding> binding = context->binding;
  Tensors results = session.run_forward_half(*context);
  for (int index : compiled_->mutated_inputs) {
    if (!inputs[index].is_inference()) inputs[index].unsafeGetTensorImpl()->bump_version();
  }
  counters().forward_runs.fetch_add(1);
  counters().saved_bytes.store(binding->plan.saved_bytes);
  if (!is_training()) return results;

  std::vector<bool> keep(context->slots.size(), false);
  for (int slot : binding->kept) keep[slot] = true;
  for (int slot : binding->transient) {
    if (!keep[slot]) context->slots[slot].reset();
  }
  context->let_go_of_views();
  results.push_back(carry ? make_carrying_token(*context) : make_token(std::move(context)));
  return results;
}

Session::Tensors Session::backward(const at::Tensor& token, const Tensors& saved,
                                   const Tensors& tangents, bool keep) {
  const bool carried = is_carrying(token);
  std::shared_ptr<Context> context;
  if (carried) {
    std::unique_ptr<Context> unpacked = unpack_carrying_token(token);
    context = {unpacked.release(), [](Context* used) { retire(std::unique_ptr<Context>(used)); }};
    keep = false;  // the token still has the bytes; this context is a copy
  } else {
    context = context_of(token);
  }
  std::lock_guard lock(context->mutex);
  TORCH_CHECK(
      !context->spent, "Trying to backward through the graph a second time: torch_ort has ",
      "overwritten the saved values. Specify retain_graph=True in the first backward call.");
  const Session &session = *context->session, &called = *context->called;
  const RunEvent event(called);
  const Binding& binding = *context->binding;
  ORT_CHECK(saved.size() == session.saved_inputs().size() + session.saved_outputs().size() &&
                tangents.size() == called.compiled_->tangents.size(),
            "run_backward: got ", saved.size(), " saved tensors and ", tangents.size(),
            " gradients, want ", session.saved_inputs().size() + session.saved_outputs().size(),
            " and ", called.compiled_->tangents.size());
  RunGuard guard(session.device());

  const std::optional<Tensors> saved_numbers = computed(saved), numbers = computed(tangents);
  const Tensors& read = saved_numbers ? *saved_numbers : saved;
  size_t next = 0;
  for (int index : session.saved_inputs())
    context->slots[session.compiled_->inputs[index]] = read[next++];
  for (int index : session.saved_outputs())
    context->slots[session.compiled_->outputs[index]] = read[next++];
  const Tensors& given = numbers ? *numbers : tangents;

  std::vector<at::Tensor> kept;
  if (keep) {
    for (int slot : binding.kept) kept.push_back(context->slots[slot]);
  }
  const std::vector<bool> defined = which_are_defined(given);
  const bool is_expected =
      context->expected ? defined == context->expected->defined : are_all_true(defined);
  Tensors gradients = is_expected
                          ? called.run_expected_backward(*context, given, keep)
                          : called.partial_backward(defined, *context)->run(*context, given);
  called.expect(defined);
  counters().backward_runs.fetch_add(1);
  if (keep) {
    context->let_go_of_views();
    for (int slot : binding.transient) context->slots[slot].reset();
    for (size_t i = 0; i < kept.size(); ++i) context->slots[binding.kept[i]] = kept[i];
  } else {
    context->clear();  // its memory serves the next call, though the token may live on for a while
    context->spent = true;
  }
  return gradients;
}

// When the graph is kept, backward works on a copy of the memory that it may overwrite.
Session::Tensors Session::run_whole_backward(Context& context, bool keep) const {
  const Binding& binding = *context.binding;
  std::shared_ptr<SharedBuffer> memory = context.context_memory;
  const bool is_copied = keep && memory;
  if (is_copied) {
    memory = lend_context_memory(binding);
    const int64_t bytes = binding.plan.crossing_bytes;
    bytes_over(memory->data(), bytes, device())
        .copy_(bytes_over(context.context_memory->data(), bytes, device()));
    context.attach_context_memory(memory->data());
  }
  Tensors gradients;
  ScratchLease scratch(context, binding.plan.backward_scratch_bytes);
  run_steps(context, binding.backward);
  may_fail("gradients");
  for (size_t i = 0; i < compiled_->gradients.size(); ++i) {
    const int slot = compiled_->gradients[i], root = binding.delivered[i];
    const at::Tensor gradient =
        root < 0 ? context.slots[slot] : deliver(context.slots[slot], binding, root, *memory);
    gradients.push_back(with_promised_strides(gradient, binding.specs[slot]));
  }
  if (is_copied) {
    context.attach_context_memory(context.context_memory->data());
    memory->end_context();
  }
  return gradients;
}

// The gradients that come in are those for which the context is planned.
Session::Tensors Session::run_expected_backward(Context& context, const Tensors& tangents,
                                                bool keep) const {
  const Session& session = *context.session;
  size_t next = 0;
  for (const at::Tensor& tangent : tangents) {
    if (tangent.defined()) context.slots[session.compiled_->tangents[next++]] = tangent;
  }
  Tensors made = session.run_whole_backward(context, keep);
  if (context.expected == nullptr) return made;
  Tensors gradients(compiled_->gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int position = context.expected->gradients[i];
    if (position >= 0) gradients[i] = made[position];
  }
  return gradients;
}

void Session::expect(const std::vector<bool>& defined) const {
  std::lock_guard lock(mutex_);
  last_defined_ = are_all_true(defined) ? std::vector<bool>() : defined;
}

std::shared_ptr<const ExpectedBackward> Session::expected_backward() const {
  std::lock_guard lock(mutex_);
  if (last_defined_.empty()) return nullptr;
  if (expected_backwards_.size() > compiled_->options.max_bindings) expected_backwards_.clear();
  const auto [found, is_new] = expected_backwards_.try_emplace(last_defined_);
  if (is_new) found->second = make_expected_backward(*compiled_, last_defined_);
  return found->second;
}

std::shared_ptr<const Session> Session::expected_session() const {
  std::lock_guard lock(mutex_);
  const auto found = expected_backwards_.find(last_defined_);
  return found == expected_backwards_.end() || !found->second ? nullptr : found->second->session;
}

std::shared_ptr<const PartialBackward> Session::partial_backward(const std::vector<bool>& defined,
                                                                 const Context& context) const {
  std::lock_guard lock(mutex_);
  if (partial_backwards_.size() > compiled_->options.max_bindings) partial_backwards_.clear();
  auto& found = partial_backwards_[defined];
  if (found == nullptr) found = std::make_shared<PartialBackward>(compiled_, defined, context);
  return found;
}

// Header: magic, session, binding, number of late symbols, number of kept tensors; then the late
// symbols' values; then per kept tensor: slot, dtype, dims, sizes, strides. All int64. Then the
// part of the context's memory that crosses, then the kept tensors, each aligned.
at::Tensor Session::make_carrying_token(const Context& context) const {
  const Binding& binding = *context.binding;
  std::vector<int64_t> header = {kCarryMagic, id_, binding.serial,
                                 static_cast<int64_t>(context.late_symbols.size()),
                                 static_cast<int64_t>(binding.kept.size())};
  for (const auto& [name, value] : context.late_symbols) {
    header.push_back(static_cast<int64_t>(name.size()));
    for (char letter : name) header.push_back(letter);
    header.push_back(value);
  }
  Tensors kept;
  for (int slot : binding.kept) {
    const at::Tensor tensor = context.slots[slot].contiguous();
    if (is_python_context(tensor)) hold_python_context(tensor);
    header.insert(header.end(), {slot, static_cast<int64_t>(tensor.scalar_type()), tensor.dim()});
    header.insert(header.end(), tensor.sizes().begin(), tensor.sizes().end());
    kept.push_back(tensor);
  }
  header.insert(header.begin() + 1, static_cast<int64_t>(header.size() + 1));

  const int64_t header_bytes = aligned(static_cast<int64_t>(header.size() * sizeof(int64_t)));
  const int64_t context_bytes = binding.plan.crossing_bytes;
  int64_t total = header_bytes + aligned(context_bytes);
  for (const at::Tensor& tensor : kept) total += aligned(static_cast<int64_t>(tensor.nbytes()));
  at::Tensor token = at::empty({total}, at::TensorOptions().dtype(at::kByte).device(device()));
  const auto write = [&token](int64_t offset, const void* data, int64_t size, c10::Device device) {
    if (size == 0) return;
    token.narrow(0, offset, size).copy_(bytes_over(const_cast<void*>(data), size, device));
  };
  write(0, header.data(), static_cast<int64_t>(header.size() * sizeof(int64_t)), c10::kCPU);
  if (context_bytes > 0) {
    write(header_bytes, context.context_memory->data(), context_bytes, device());
  }
  int64_t offset = header_bytes + aligned(context_bytes);
  for (const at::Tensor& tensor : kept) {
    write(offset, tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()), tensor.device());
    offset += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
  return token;
}

std::unique_ptr<Context> Session::unpack_carrying_token(const at::Tensor& token) {
  const auto read_header = [&token](int64_t count) {
    at::Tensor bytes =
        token.narrow(0, 0, count * static_cast<int64_t>(sizeof(int64_t))).cpu().contiguous();
    const auto* data = reinterpret_cast<const int64_t*>(bytes.const_data_ptr());
    return std::vector<int64_t>(data, data + count);
  };
  TORCH_CHECK(token.dim() == 1 && token.numel() >= 16 && read_header(1)[0] == kCarryMagic,
              "torch_ort: a saved-tensor hook gave back another tensor than it was given");
  const std::vector<int64_t> header = read_header(read_header(2)[1]);
  size_t next = 2;
  std::shared_ptr<Session> session = find_session(header[next++]);
  std::shared_ptr<Binding> binding = session->binding_of_serial(header[next++]);
  const int64_t num_late = header[next++], num_kept = header[next++];
  std::unique_ptr<Context> context = binding->take_context();
  context->session = session;
  context->called = session;
  for (int64_t i = 0; i < num_late; ++i) {
    std::string name;
    for (int64_t length = header[next++]; length > 0; --length)
      name += static_cast<char>(header[next++]);
    context->late_symbols.emplace_back(std::move(name), header[next++]);
  }
  int64_t offset = aligned(static_cast<int64_t>(header.size() * sizeof(int64_t)));
  RunGuard guard(session->device());
  const int64_t context_bytes = binding->plan.crossing_bytes;
  if (binding->plan.context_bytes > 0) {
    context->context_memory = session->lend_context_memory(*binding);
    context->attach_context_memory(context->context_memory->data());
    bytes_over(context->context_memory->data(), context_bytes, session->device())
        .copy_(token.narrow(0, offset, context_bytes));
  }
  offset += aligned(context_bytes);
  for (int64_t i = 0; i < num_kept; ++i) {
    const auto slot = static_cast<size_t>(header[next++]);
    const auto dtype = static_cast<c10::ScalarType>(header[next++]);
    std::vector<int64_t> sizes(static_cast<size_t>(header[next++]));
    for (int64_t& size : sizes) size = header[next++];
    at::Tensor tensor =
        at::empty(sizes, at::TensorOptions().dtype(dtype).device(session->device()));
    if (tensor.numel() > 0) {
      bytes_over(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()), tensor.device())
          .copy_(token.narrow(0, offset, static_cast<int64_t>(tensor.nbytes())));
    }
    offset += aligned(static_cast<int64_t>(tensor.nbytes()));
    const TensorSpec& spec = binding->specs[slot];
    context->slots[slot] = with_promised_strides(tensor, spec);
  }
  return context;
}

}  // namespace torch_ort::run
