#include "run/context.h"

#include "run/guard.h"
#include "run/replay.h"
#include "run/steps/collective.h"
#include "run/steps/view.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <utility>

namespace torch_ort::run {

namespace {

// The chunk that holds an offset of the context area.
size_t chunk_at(const plan::Plan& plan, int64_t offset) {
  const auto next =
      std::upper_bound(plan.chunks.begin(), plan.chunks.end(), offset,
                       [](int64_t at, const plan::Chunk& chunk) { return at < chunk.offset; });
  return static_cast<size_t>(next - plan.chunks.begin()) - 1;
}

}  // namespace

Context::Context(std::shared_ptr<Binding> of) : binding(std::move(of)) {
  const c10::Device device = binding->graph->device;
  const plan::Plan& plan = binding->plan;
  empty_storage = storage_without_memory(0, device);
  slots.resize(binding->specs.size());
  chunks.resize(plan.chunks.size());
  for (int slot : binding->owned) {
    const plan::Placement& place = plan.placements[slot];
    const TensorSpec& spec = binding->specs[slot];
    c10::Storage storage = storage_without_memory(spec.bytes, device);
    slots[slot] = tensor_over(storage, spec, 0);
    if (place.area == plan::Area::kScratch) {
      scratch_parts.push_back({std::move(storage), place.offset});
    } else if (!chunks.empty()) {
      const size_t index = chunk_at(plan, place.offset);
      const int64_t offset = place.offset - plan.chunks[index].offset;
      chunks[index].parts.push_back({std::move(storage), offset});
    }
  }
  for (const auto& [place, whole] : binding->parts) {
    const TensorSpec& spec = binding->specs[place.slot];
    const int64_t bytes = place.offset * static_cast<int64_t>(c10::elementSize(spec.dtype));
    slots[place.slot] = tensor_over(slots[whole].storage(), spec, bytes);
  }
  for (const auto& [slot, tensor] : binding->graph->constants) slots[slot] = tensor;
  views.resize(slots.size());
  for (const ViewSpec* view : binding->moving_views) {
    TensorSpec spec = binding->specs[view->slot];
    spec.sizes = view->sizes;
    spec.strides = view->strides;
    views[view->slot] = tensor_over(empty_storage, spec, 0);
  }
  RunGuard guard(device);
  for (const auto& [step, bound] : binding->static_results) bound->make_static(*this);
}

void Context::attach(std::vector<Part>& parts, void* data) {
  const c10::Device device = binding->graph->device;
  for (Part& part : parts) {
    void* address = data == nullptr ? nullptr : static_cast<char*>(data) + part.offset;
    part.storage.set_data_ptr_noswap(c10::DataPtr(address, device));
  }
}

char* Context::context_data() const {
  return chunks.empty() || !chunks[0].buffer ? nullptr
                                             : static_cast<char*>(chunks[0].buffer->data());
}

std::vector<at::Tensor> Context::crossing_bytes() const {
  const plan::Plan& plan = binding->plan;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const plan::Chunk& chunk = plan.chunks[i];
    const int64_t bytes = std::min(chunk.bytes, plan.crossing_bytes - chunk.offset);
    if (bytes <= 0) break;
    // PyTorch need not ask CUDA where the memory is.
    const c10::Device device = binding->graph->device;
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    parts.push_back(at::for_blob(chunks[i].buffer->data(), {bytes})
                        .options(options)
                        .target_device(device)
                        .make_tensor());
  }
  return parts;
}

void Context::attach_chunk(size_t index, std::shared_ptr<SharedBuffer> buffer) {
  attach(chunks[index].parts, buffer->data());
  chunks[index].buffer = std::move(buffer);
}

void Context::release_chunk(size_t index) {
  ChunkMemory& chunk = chunks[index];
  attach(chunk.parts, nullptr);
  if (chunk.buffer) chunk.buffer->end_context();
  chunk.buffer.reset();
}

void Context::attach_scratch(void* data) {
  scratch_data = static_cast<char*>(data);
  attach(scratch_parts, data);
}

void Context::store(int slot, at::Tensor tensor) {
  if (slot < 0) return;
  if (is_computed_by_reader(tensor)) [[unlikely]]
    tensor = computed(tensor);
  slots[slot] = std::move(tensor);
  if (graph().facts[slot].unbacked) bind_unbacked_symbols(slot);
}

void Context::bind_unbacked_symbols(int slot) {
  const ir::Type& type = graph().value(slot).type;
  if (!type.shape) return;
  const at::Tensor& tensor = slots[slot];
  const size_t dims = std::min<size_t>(type.shape->size(), tensor.dim());
  for (size_t i = 0; i < dims; ++i) {
    const ir::Dim& dim = (*type.shape)[i];
    if (!dim.is_symbol() || symbol(dim.name())) continue;
    unbacked_symbols.emplace_back(dim.name(), tensor.size(static_cast<int64_t>(i)));
  }
}

void Context::point(const ViewSpec& view, const c10::Storage& storage, int64_t offset) {
  const at::Tensor& object = views[view.slot];
  object.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  object.unsafeGetTensorImpl()->set_storage_offset(offset);
  slots[view.slot] = object;
}

std::optional<int64_t> Context::symbol(const std::string& name) const {
  for (const auto& [symbol, value] : binding->symbols) {
    if (symbol == name) return value;
  }
  for (const auto& [symbol, value] : unbacked_symbols) {
    if (symbol == name) return value;
  }
  return std::nullopt;
}

// The context keeps its view objects, but they stop referring to memory of the caller.
void Context::let_go_of_views() {
  for (const ViewSpec* view : binding->moving_views) {
    views[view->slot].unsafeGetTensorImpl()->set_storage_keep_dtype(empty_storage);
  }
}

void Context::release_all_but_kept() {
  let_go_of_views();
  std::vector<bool> is_kept(slots.size(), false);
  for (int slot : binding->kept) is_kept[slot] = true;
  for (int slot : binding->transient) {
    if (!is_kept[slot]) slots[slot].reset();
  }
}

void Context::clear() {
  // Others read and write this memory until then.
  if (!in_flight.empty()) wait_for_all(*this);
  let_go_of_views();
  for (int slot : binding->transient) slots[slot].reset();
  unbacked_symbols.clear();
  stack.clear();
  for (size_t i = 0; i < chunks.size(); ++i) release_chunk(i);
  attach_scratch(nullptr);
  spent = false;
  is_replayed = false;
  if (std::exchange(replays, false)) binding->replay->take_back();
}

}  // namespace torch_ort::run
