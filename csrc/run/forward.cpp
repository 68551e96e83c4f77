// The forward call of a session, and the token that stands for its state until backward has run.
#include "base/error.h"
#include "base/failpoint.h"
#include "run/calls.h"
#include "run/companion.h"
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

// A forward call whose backward has not run yet.
struct LiveCall {
  std::shared_ptr<Context> context;
  std::shared_ptr<Companion> companion;
};

// The calls by the values of their tokens.
struct ContextTable {
  std::mutex mutex;
  std::unordered_map<int64_t, LiveCall> calls;
  std::atomic<int64_t> next_token{1};
};

ContextTable& context_table() {
  // Never destroyed, because tokens may be dropped while the process ends.
  static ContextTable* table = new ContextTable;
  return *table;
}

// Returns a context to the pool, unless its session or binding is gone.
void retire(std::unique_ptr<Context> context) noexcept {
  context->clear();
  if (context->failed) return;
  const std::shared_ptr<Session> session = std::move(context->session);
  const std::shared_ptr<const Session> called = std::move(context->called);
  const std::shared_ptr<const ExpectedBackward> expected = std::move(context->expected);
  // An idle context must not own the binding that owns it.
  std::shared_ptr<Binding> binding = std::move(context->binding);
  std::lock_guard lock(binding->mutex);
  binding->idle.push_back(std::move(context));
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

// Calls `function` with the call of a token, under the lock of the table.
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

// Scratch memory that is lent to one half while it runs.
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

constexpr int64_t kCarryMagic = 0x746f727463617272;  // "tortcarr"
constexpr int64_t kCarryAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kCarryAlignment - 1) / kCarryAlignment * kCarryAlignment;
}

}  // namespace

std::shared_ptr<Context> shared_context(std::unique_ptr<Context> context) {
  return {context.release(), [](Context* used) { retire(std::unique_ptr<Context>(used)); }};
}

std::shared_ptr<Context> context_of(const at::Tensor& token) {
  return with_call(token, [](LiveCall& call) { return call.context; });
}

at::Tensor with_promised_strides(const at::Tensor& tensor, const TensorSpec& spec) {
  if (!spec.known || !tensor.defined() || tensor.is_sparse()) return tensor;
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

at::Tensor bytes_over(void* data, int64_t size, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  // PyTorch need not ask CUDA where the memory is.
  return at::for_blob(data, {size}).options(options).target_device(device).make_tensor();
}

RunEvent::RunEvent(const Session& session) {
  if (event_.isActive()) event_.before("torch_ort::session " + std::to_string(session.id()));
}

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
                                              const std::vector<int64_t>& symbols, bool early) {
  if (early) {
    std::shared_ptr<Binding> binding = find_binding(inputs, symbols, {delivery_->is_on, true});
    if (binding->num_segments > 1) return or_without_delivery(std::move(binding), inputs, symbols);
  }
  return find_binding(inputs, symbols, {delivery_->is_on, false});
}

// The binding without delivered gradients, if that one needs less memory. Delivered gradients
// occupy memory of the context until backward ends. If nobody holds them for so long, allocating
// each may need less.
std::shared_ptr<Binding> Session::or_without_delivery(std::shared_ptr<Binding> delivering,
                                                      const Tensors& inputs,
                                                      const std::vector<int64_t>& symbols) {
  if (!delivering->leaving.deliver || !delivery_->is_dropped_early) return delivering;
  std::shared_ptr<Binding> other = find_binding(inputs, symbols, {false, true});
  const int64_t bytes = other->plan.peak_bytes + other->largest_segment_bytes;
  return bytes < delivering->plan.peak_bytes ? other : delivering;
}

std::shared_ptr<Binding> Session::find_binding(const Tensors& inputs,
                                               const std::vector<int64_t>& symbols,
                                               Leaving leaving) {
  {
    std::lock_guard lock(mutex_);
    for (auto found = bindings_.begin(); found != bindings_.end(); ++found) {
      if (!(*found)->matches(inputs, symbols, leaving)) continue;
      bindings_.splice(bindings_.begin(), bindings_, found);
      return bindings_.front();
    }
  }
  std::shared_ptr<Binding> binding = make_binding(compiled_, inputs, symbols, leaving);
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
  throw UserError(concat(
      "saved-tensor hooks: more than ", compiled_->options.max_bindings,
      " sets of sizes of one graph wait for their backward; run or drop some of them first"));
}

void Session::prepare_like(const Session& other) {
  const std::shared_ptr<const Session> theirs = other.expected_session();
  const Session& planned = theirs ? *theirs : other;
  std::shared_ptr<Binding> used;
  std::vector<bool> defined;
  {
    std::lock_guard lock(other.mutex_);
    defined = other.last_expected_;
  }
  {
    std::lock_guard lock(planned.mutex_);
    if (!planned.bindings_.empty()) used = planned.bindings_.front();
  }
  if (!used) throw UserError("prepare_like: the other session has not run yet");
  Tensors inputs;
  for (const TensorSpec& spec : used->inputs) {
    inputs.push_back(spec.known
                         ? tensor_over(storage_without_memory(spec.bytes, spec.device), spec, 0)
                         : at::Tensor());
  }
  {
    std::lock_guard lock(mutex_);
    last_defined_ = std::move(defined);
  }
  const auto expected = expected_backward();
  Session& session = expected ? *expected->session : *this;
  session.binding_for(inputs, used->symbol_inputs, used->leaving.early);
}

void Session::lend_context_memory(Context& context) const {
  const Binding& binding = *context.binding;
  if (binding.plan.chunks.empty()) return;
  may_fail("memory");
  release_dead_memory(true);
  const auto delivery = binding.leaving.deliver ? delivery_ : nullptr;
  for (size_t i = 0; i < binding.plan.chunks.size(); ++i) {
    Buffer memory = lend(device(), binding.plan.chunks[i].bytes);
    context.attach_chunk(i, std::make_shared<SharedBuffer>(std::move(memory), delivery));
  }
}

Session::Tensors Session::collect_outputs(Context& context) const {
  may_fail("results");
  Tensors results;
  results.reserve(compiled_->outputs.size() + 1);
  for (int slot : compiled_->outputs) {
    at::Tensor tensor = with_promised_strides(context.slots[slot], context.binding->specs[slot]);
    // An input that is returned must be another tensor object for autograd.
    if (compiled_->facts[slot].is_input || compiled_->facts[slot].is_constant)
      tensor = at::alias(tensor);
    results.push_back(std::move(tensor));
  }
  return results;
}

std::shared_ptr<Context> Session::begin_forward(const Tensors& inputs,
                                                const std::vector<int64_t>& symbols, bool early) {
  std::shared_ptr<Binding> binding = binding_for(inputs, symbols, early);
  std::shared_ptr<Context> context = shared_context(binding->take_context());
  context->session = shared_from_this();
  lend_context_memory(*context);
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
                             "': got a conjugate or negative view that the graph writes into, want "
                             "a tensor without these bits"));
  }
}

Session::Tensors Session::run_body(const Tensors& inputs, const std::vector<int64_t>& symbols) {
  return run_forward_half(*begin_forward(inputs, symbols, false));
}

Session::Tensors Session::forward(const Tensors& inputs, const std::vector<int64_t>& symbols,
                                  bool carry, bool early) {
  const RunEvent event(*this);
  release_dead_memory(is_training());
  RunGuard guard(device());
  const std::optional<Tensors> numbers = computed(inputs);
  if (numbers) refuse_writing_into_copies(inputs);
  // A token that carries its bytes is for one session and its plan, so the expected backward is not
  // used.
  const auto expected = carry ? nullptr : expected_backward();
  Session& session = expected ? *expected->session : *this;
  std::shared_ptr<Context> context =
      session.begin_forward(numbers ? *numbers : inputs, symbols, early && !carry && is_training());
  context->called = shared_from_this();
  context->expected = expected;
  const std::shared_ptr<Binding> binding = context->binding;
  Tensors results = session.run_forward_half(*context);
  for (int index : compiled_->mutated_inputs) {
    if (!inputs[index].is_inference()) inputs[index].unsafeGetTensorImpl()->bump_version();
  }
  counters().forward_runs.fetch_add(1);
  ++forward_runs_of_thread();
  counters().saved_bytes.store(binding->plan.saved_bytes);
  if (!is_training()) return results;

  context->release_all_but_kept();
  results.push_back(carry ? make_carrying_token(*context) : make_token(std::move(context)));
  return results;
}

// The layout of a carrying token. First a header of int64 numbers: the magic number, the session,
// the binding, the number of unbacked symbols and the number of kept tensors; then the values of
// the symbols; then slot, dtype, device type, number of dims and sizes of each kept tensor:
// PyTorch's attention keeps the state of its random numbers on the host. The header is followed by
// the part of the context area that crosses the border, and by the kept tensors, each of them
// aligned.
at::Tensor Session::make_carrying_token(const Context& context) const {
  const Binding& binding = *context.binding;
  std::vector<int64_t> header = {kCarryMagic, id_, binding.serial,
                                 static_cast<int64_t>(context.unbacked_symbols.size()),
                                 static_cast<int64_t>(binding.kept.size())};
  for (const auto& [name, value] : context.unbacked_symbols) {
    header.push_back(static_cast<int64_t>(name.size()));
    for (char letter : name) header.push_back(letter);
    header.push_back(value);
  }
  Tensors kept;
  for (int slot : binding.kept) {
    const at::Tensor tensor = context.slots[slot].contiguous();
    if (is_python_context(tensor)) hold_python_context(tensor);
    header.insert(header.end(), {slot, static_cast<int64_t>(tensor.scalar_type()),
                                 static_cast<int64_t>(tensor.device().type()), tensor.dim()});
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
  int64_t offset = header_bytes;
  for (const at::Tensor& part : context.crossing_bytes()) {
    token.narrow(0, offset, part.numel()).copy_(part);
    offset += part.numel();
  }
  offset = aligned(offset);
  for (const at::Tensor& tensor : kept) {
    write(offset, tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()), tensor.device());
    offset += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
  return token;
}

std::unique_ptr<Context> Session::unpack_carrying_token(const at::Tensor& token) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(int64_t));
  const auto read_header = [&token](int64_t count) {
    at::Tensor bytes = token.narrow(0, 0, count * kBytes).cpu().contiguous();
    const auto* data = reinterpret_cast<const int64_t*>(bytes.const_data_ptr());
    return std::vector<int64_t>(data, data + count);
  };
  // Most headers are short. Reading one again would wait for the GPU again.
  constexpr int64_t kUsualNumbers = 512;
  const bool has_start = token.dim() == 1 && token.numel() >= 2 * kBytes;
  std::vector<int64_t> header;
  if (has_start) header = read_header(std::min(token.numel() / kBytes, kUsualNumbers));
  TORCH_CHECK(has_start && header[0] == kCarryMagic,
              "torch_ort: a saved-tensor hook gave back another tensor than it was given");
  if (header[1] > static_cast<int64_t>(header.size())) header = read_header(header[1]);
  header.resize(static_cast<size_t>(header[1]));
  size_t next = 2;
  std::shared_ptr<Session> session = find_session(header[next++]);
  std::shared_ptr<Binding> binding = session->binding_of_serial(header[next++]);
  const int64_t num_unbacked = header[next++], num_kept = header[next++];
  std::unique_ptr<Context> context = binding->take_context();
  context->session = session;
  context->called = session;
  for (int64_t i = 0; i < num_unbacked; ++i) {
    std::string name;
    for (int64_t length = header[next++]; length > 0; --length)
      name += static_cast<char>(header[next++]);
    context->unbacked_symbols.emplace_back(std::move(name), header[next++]);
  }
  int64_t offset = aligned(static_cast<int64_t>(header.size() * sizeof(int64_t)));
  RunGuard guard(session->device());
  session->lend_context_memory(*context);
  for (const at::Tensor& part : context->crossing_bytes()) {
    part.copy_(token.narrow(0, offset, part.numel()));
    offset += part.numel();
  }
  offset = aligned(offset);
  for (int64_t i = 0; i < num_kept; ++i) {
    const auto slot = static_cast<size_t>(header[next++]);
    const auto dtype = static_cast<c10::ScalarType>(header[next++]);
    const bool is_on_host = header[next++] == static_cast<int64_t>(c10::kCPU);
    const c10::Device device = is_on_host ? c10::Device(c10::kCPU) : session->device();
    std::vector<int64_t> sizes(static_cast<size_t>(header[next++]));
    for (int64_t& size : sizes) size = header[next++];
    at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
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
