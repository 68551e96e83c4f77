#include "run/replay.h"

#include "base/error.h"
#include "base/failpoint.h"
#include "run/call_watch.h"
#include "run/counters.h"
#include "run/memory/delivery.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <set>
#include <utility>

namespace torch_ort::run {

namespace {

// Runs before a part is captured: PyTorch's libraries load kernels and choose algorithms in the
// first ones.
constexpr int64_t kWarmUps = 2;
// Fewer kernels than these are not worth a graph.
constexpr int64_t kFewestKernels = 4;
// How often a part is captured, since a loop whose tensors move in every call never gains from it.
constexpr int64_t kMostCaptures = 8;
// Graphs of a part that differ in the memory of their results.
constexpr size_t kMostHeld = 2;
// How often a tensor of the caller has to move before it is copied: parameters that are replaced
// once are captured anew.
constexpr int kFewestMoves = 2;
// Runs in a row that the graphs of a part do not fit before they are dropped.
constexpr int kMostMisses = 3;
// Bytes of the caller's tensors that a part may copy: some 40 us of an H100's memory.
constexpr int64_t kMostCopied = int64_t{64} << 20;

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(c10::Device(c10::kCUDA, device));
}

int64_t byte_offset(const at::Tensor& tensor) {
  return tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

std::vector<const void*> addresses_of(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> addresses;
  for (const at::Tensor& tensor : tensors) {
    addresses.push_back(tensor.defined() ? tensor.const_data_ptr() : nullptr);
  }
  return addresses;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// The first reason why the host has to take part in each run of the steps.
std::string why_host_is_needed(const CompiledGraph& graph) {
  using Mode = SessionOptions::RegionMode;
  if (graph.options.synchronize || graph.options.region_mode != Mode::kKernel) {
    return "an option has the host look at each step";
  }
  if (graph.has_unbacked_values) return "sizes depend on data, which the host reads";
  for (const auto& step : graph.steps) {
    std::string why = step->why_host_is_needed();
    for (int slot : step->outputs) {
      const bool is_on_host = slot >= 0 && ir::is_host(graph.value(slot).type.device);
      if (why.empty() && is_on_host) why = "it gives the host a result";
    }
    if (!why.empty()) return concat(place_of(*step), ": ", step->op_name(), ": ", why);
  }
  return "";
}

}  // namespace

// --- what is known of a part ---------------------------------------------------------------------

struct Replay::Captured {
  // A tensor that is in a slot after the part, and was not before. Its memory is the graph's own,
  // that of a tensor which the part has read, or that of one which the plan has placed.
  struct Left {
    int slot;
    TensorSpec spec;
    int storage = -1;        // in `storages`
    int read = -1;           // in Part::read
    int owner = -1;          // the slot of a tensor that the plan has placed
    int64_t offset = 0;      // bytes from the beginning of the storage, or from that tensor
    bool is_copied = false;  // into memory of its own
  };

  std::unique_ptr<const DeviceGraph> graph;
  std::vector<const void*> addresses;  // by Part::read; nullptr for those that are copied
  Tensors copies;                      // by Part::read; undefined for those that are not copied
  std::vector<c10::Storage> storages;  // what is left in the graph's memory
  std::vector<Left> left;
  std::vector<int> released;  // slots
  StepCounts counts;

  // Whether nobody holds a tensor of an earlier replay.
  bool is_free() const {
    return std::all_of(storages.begin(), storages.end(),
                       [](const c10::Storage& storage) { return storage.use_count() == 1; });
  }
  void fill_copies(const Tensors& given) const {
    for (size_t i = 0; i < given.size(); ++i) {
      if (copies[i].defined()) at::Tensor(copies[i]).copy_(given[i]);
    }
  }
  bool is_at(const std::vector<const void*>& now) const {
    for (size_t i = 0; i < addresses.size(); ++i) {
      if (!copies[i].defined() && addresses[i] != now[i]) return false;
    }
    return true;
  }
};

struct Replay::Part {
  std::span<const BoundSteps::value_type> steps;
  std::vector<int> read;          // slots that are filled before, and that the steps read
  std::vector<bool> may_move;     // by `read`: whether a copy would do
  std::vector<int> moves;         // by `read`: how often it has moved
  std::vector<const void*> last;  // addresses in the newest run, by `read`
  std::vector<std::unique_ptr<const Captured>> captured;
  int misses = 0;
  ReplayReport::Part report;

  Tensors given(const Context& context) const {
    Tensors tensors;
    for (int slot : read) tensors.push_back(context.slots[slot]);
    return tensors;
  }
};

// --- the memory ----------------------------------------------------------------------------------

Replay::Replay(const Binding& binding)
    : binding_(binding), refused_(why_host_is_needed(*binding.graph)) {
  const CompiledGraph& graph = *binding.graph;
  is_callers_.assign(graph.facts.size(), false);
  is_written_ = is_output_ = is_callers_;
  for (const auto* slots : {&graph.inputs, &graph.outputs, &graph.tangents}) {
    for (int slot : *slots) is_callers_[slot] = true;
  }
  for (int slot : graph.outputs) is_output_[slot] = true;
  const auto note_written = [&](int slot) {
    is_written_[slot] = is_written_[graph.facts[slot].root] = true;
  };
  for (const auto& step : graph.steps) {
    for (int slot : step->mutates()) note_written(slot);
  }
  for (int index : graph.mutated_inputs) note_written(graph.inputs[index]);
  if (!refused_.empty()) return;
  refused_ = device_graphs() == nullptr ? "no CUDA graphs here" : device_graphs()->missing();
}

Replay::~Replay() = default;

c10::DeviceIndex Replay::device() const {
  const c10::Device& device = binding_.graph->device;
  return device.has_index() ? device.index()
                            : c10::impl::VirtualGuardImpl(device.type()).getDevice().index();
}

bool Replay::lend(Context& context) {
  if (!refused_.empty() || device_graphs()->is_capturing(device())) return false;
  if (is_lent_.exchange(true)) return false;
  context.replays = true;  // from here on Context::clear() gives it back
  const c10::Stream stream = current_stream(device());
  if (!stream_) stream_ = stream;
  if (*stream_ != stream) {
    context.replays = false;
    take_back();
    return false;
  }
  if (chunks_.empty() && scratch_.data() == nullptr) allocate_memory();
  attach_memory(context);
  return true;
}

void Replay::allocate_memory() {
  may_fail("memory");
  const plan::Plan& plan = binding_.plan;
  const c10::Device device = binding_.graph->device;
  for (const plan::Chunk& chunk : plan.chunks) {
    chunks_.push_back(std::make_shared<SharedBuffer>(allocate(device, chunk.bytes), nullptr));
  }
  scratch_ = allocate(device, std::max(plan.forward_scratch_bytes, plan.backward_scratch_bytes));
}

void Replay::attach_memory(Context& context) const {
  for (size_t i = 0; i < chunks_.size(); ++i) context.attach_chunk(i, chunks_[i]);
  context.attach_scratch(scratch_.data());
}

void Replay::take_back() noexcept { is_lent_ = false; }

void Replay::free_idle() {
  if (is_lent_.exchange(true)) return;
  parts_.clear();
  chunks_.clear();
  scratch_.give_back();
  stream_.reset();
  take_back();
}

ReplayReport Replay::report() const {
  const std::lock_guard lock(mutex_);
  ReplayReport report{.refused = refused_};
  for (const auto& [range, part] : report_) report.parts.push_back(part);
  return report;
}

// --- a run ---------------------------------------------------------------------------------------

void Replay::run(Context& context, StepRange range) {
  Part& part = part_of(context, range);
  const Captured* captured = find_or_capture(context, part);
  if (captured != nullptr) {
    ++part.report.replays;
  } else {
    run_steps(context, part.steps);
    ++part.report.runs;
  }
  if (!range.is_backward) context.is_replayed = captured != nullptr;
  const std::lock_guard lock(mutex_);
  report_.insert_or_assign(range, part.report);
}

Replay::Part& Replay::part_of(const Context& context, StepRange range) {
  std::unique_ptr<Part>& part = parts_[range];
  if (part != nullptr) return *part;
  part = std::make_unique<Part>();
  const BoundSteps& steps = range.is_backward ? binding_.backward : binding_.forward;
  part->steps = std::span(steps).subspan(range.begin, range.end - range.begin);
  part->report.range = range;
  const int64_t kernels =
      std::count_if(part->steps.begin(), part->steps.end(),
                    [](const auto& step) { return !step->is_done && !step->is_view(); });
  if (kernels < kFewestKernels) part->report.refused = concat("it has ", kernels, " kernels");
  std::vector<bool> is_read(context.slots.size(), false);
  for (const auto& bound : part->steps) {
    for (int slot : bound->step.reads()) is_read[slot] = true;
  }
  for (int slot : binding_.transient) {
    if (!is_read[slot] || !context.slots[slot].defined()) continue;
    part->read.push_back(slot);
    part->may_move.push_back(is_callers_[slot] && !is_written_[slot]);
  }
  part->moves.assign(part->read.size(), 0);
  return *part;
}

// Notes where the tensors are, and counts how often each has moved from one run to the next.
void Replay::note_addresses(const Tensors& given, Part& part) {
  std::vector<const void*> now = addresses_of(given);
  for (size_t i = 0; i < part.last.size(); ++i) {
    if (now[i] != part.last[i] && part.may_move[i]) ++part.moves[i];
  }
  part.last = std::move(now);
}

// Replays a graph that fits, or captures and replays one. Returns nullptr if the part has to run
// step by step.
const Replay::Captured* Replay::find_or_capture(Context& context, Part& part) {
  const ReplayReport::Part& report = part.report;
  const Tensors given = part.given(context);
  note_addresses(given, part);
  if (!report.refused.empty() || report.runs < kWarmUps) return nullptr;
  // Backward reads what forward has left, which is where it was only after a replay.
  if (report.range.is_backward && !context.is_replayed) return nullptr;
  if (current_stream(device()) != *stream_ || device_graphs()->is_capturing(device())) {
    return nullptr;
  }
  if (const Captured* found = find(part)) {
    found->fill_copies(given);
    replay(context, part, *found, given);
    add_to_counters(found->counts);
    return found;
  }
  if (part.misses > 0 || part.captured.size() == kMostHeld) return nullptr;
  if (!report.range.is_backward) {
    // What backward reads will be elsewhere.
    for (const auto& [range, each] : parts_) {
      if (range.is_backward) each->captured.clear();
    }
  }
  return capture(context, part, given);
}

// The graph that may be replayed; nullptr if there is none. Drops the graphs of a part if it will
// not fit them any more.
const Replay::Captured* Replay::find(Part& part) {
  const std::vector<const void*>& now = part.last;
  bool fits = false;
  for (const auto& captured : part.captured) {
    if (!captured->is_at(now)) continue;
    part.misses = 0;
    if (captured->is_free()) return captured.get();
    fits = true;
  }
  if (part.captured.empty() || fits) return nullptr;
  const Captured& newest = *part.captured.back();
  bool is_callers = false;
  for (size_t i = 0; i < now.size(); ++i) {
    is_callers |= part.may_move[i] && !newest.copies[i].defined() && newest.addresses[i] != now[i];
  }
  if (!is_callers && ++part.misses < kMostMisses) return nullptr;
  part.captured.clear();
  part.misses = 0;
  return nullptr;
}

const Replay::Captured* Replay::capture(Context& context, Part& part, const Tensors& given) const {
  std::string& refused = part.report.refused;
  refused = why_not_captured(part, given);
  if (!refused.empty()) {
    part.captured.clear();
    return nullptr;
  }
  ++part.report.captures;
  auto made = std::make_unique<Captured>();
  made->addresses = part.last;
  made->copies.resize(given.size());
  const Tensors before = context.slots;
  try {
    for (size_t i = 0; i < given.size(); ++i) {
      if (part.moves[i] < kFewestMoves) continue;
      made->copies[i] = make_tensor(spec_of(given[i]));
      context.slots[part.read[i]] = made->copies[i];
    }
    made->fill_copies(given);
    made->graph =
        device_graphs()->capture(device(), [&] { made->counts = run_steps(context, part.steps); });
    list_left(context, part, before, given, *made);
  } catch (const DeviceError&) {
    throw;
  } catch (const c10::IndexError&) {
    throw;  // of an earlier step, whose labels or ids kernels have found to be out of bounds
  } catch (const std::exception& error) {
    // Nothing has run, so it may run step by step.
    refused = first_line(error.what());
    part.captured.clear();
    context.slots = before;
    context.stack.clear();
    context.failed = false;
    attach_memory(context);
    return nullptr;
  }
  counters().cuda_graphs_captured.fetch_add(1);
  part.captured.push_back(std::move(made));
  replay(context, part, *part.captured.back(), given);
  return part.captured.back().get();
}

std::string Replay::why_not_captured(const Part& part, const Tensors& given) {
  if (part.report.captures == kMostCaptures) return "what it reads moves too often";
  int64_t copied = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].is_cuda()) return "it reads a tensor of the host";
    if (part.moves[i] < kFewestMoves) continue;
    const TensorSpec spec = spec_of(given[i]);
    if (may_overlap(spec)) return "what has moved cannot be copied";
    copied += spec.bytes;
  }
  if (copied <= kMostCopied) return "";
  return concat(copied >> 20, " MiB of what it reads have moved, want at most ", kMostCopied >> 20);
}

// Notes what the slots hold now, after the steps, and did not hold before.
void Replay::list_left(Context& context, const Part& part, const Tensors& before,
                       const Tensors& given, Captured& captured) const {
  std::map<const c10::StorageImpl*, int> reads, owners, storages;
  const auto read_in_capture = [&](size_t i) -> const at::Tensor& {
    return captured.copies[i].defined() ? captured.copies[i] : given[i];
  };
  for (size_t i = 0; i < given.size(); ++i) {
    reads.emplace(storage_of(read_in_capture(i)), static_cast<int>(i));
  }
  for (int slot : binding_.owned) owners.emplace(storage_of(context.slots[slot]), slot);
  std::set<const c10::StorageImpl*> given_out;
  for (int slot : binding_.transient) {
    const at::Tensor& tensor = context.slots[slot];
    if (!tensor.defined()) {
      if (before[slot].defined()) captured.released.push_back(slot);
      continue;
    }
    if (tensor.is_same(before[slot])) continue;
    const auto copy = std::find_if(captured.copies.begin(), captured.copies.end(),
                                   [&](const at::Tensor& each) { return each.is_same(tensor); });
    if (copy != captured.copies.end() && part.read[copy - captured.copies.begin()] == slot) {
      continue;
    }
    if (!tensor.has_storage() || is_computed_by_reader(tensor)) {
      throw Unsupported("it leaves a tensor that is not strided");
    }
    Captured::Left left{.slot = slot, .spec = spec_of(tensor), .offset = byte_offset(tensor)};
    const c10::StorageImpl* storage = storage_of(tensor);
    if (const auto read = reads.find(storage); read != reads.end()) {
      left.read = read->second;
      left.offset -= byte_offset(read_in_capture(left.read));
    } else if (const auto owner = owners.find(storage); owner != owners.end()) {
      left.owner = owner->second;
      left.offset -= byte_offset(context.slots[left.owner]);
    } else {
      const auto [found, is_new] = storages.emplace(storage, captured.storages.size());
      if (is_new) captured.storages.push_back(tensor.storage());
      left.storage = found->second;
    }
    left.is_copied = left.read < 0 && is_output_[slot] && !part.report.range.is_backward;
    if (left.is_copied && (may_overlap(left.spec) || !given_out.insert(storage).second)) {
      throw Unsupported("it gives out views of one tensor");
    }
    captured.left.push_back(std::move(left));
  }
}

void Replay::replay(Context& context, const Part& part, const Captured& captured,
                    const Tensors& given) const {
  CallWatch::begin();
  RECORD_FUNCTION("torch_ort::replay", c10::ArrayRef<const c10::IValue>{});
  for (size_t i = 0; i < given.size(); ++i) context.slots[part.read[i]] = given[i];
  captured.graph->replay();
  counters().cuda_graphs_replayed.fetch_add(1, std::memory_order_relaxed);
  for (const Captured::Left& left : captured.left) {
    const at::Tensor* base = left.read >= 0    ? &given[left.read]
                             : left.owner >= 0 ? &context.slots[left.owner]
                                               : nullptr;
    at::Tensor tensor =
        base != nullptr ? tensor_over(base->storage(), left.spec, byte_offset(*base) + left.offset)
                        : tensor_over(captured.storages[left.storage], left.spec, left.offset);
    if (left.is_copied) {
      at::Tensor copy = make_tensor(left.spec);
      copy.copy_(tensor);
      tensor = std::move(copy);
    }
    context.slots[left.slot] = std::move(tensor);
  }
  for (int slot : captured.released) context.slots[slot].reset();
}

}  // namespace torch_ort::run
