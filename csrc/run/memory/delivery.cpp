#include "run/memory/delivery.h"

#include <set>
#include <utility>
#include <vector>

namespace torch_ort::run {

namespace {

// The buffers from which gradients have been handed out.
struct HeldBuffers {
  std::mutex mutex;
  std::set<SharedBuffer*> buffers;
  // Read without the lock, so that nobody waits if there are none.
  std::atomic<size_t> count{0};
};

HeldBuffers& held_buffers() {
  static HeldBuffers* held = new HeldBuffers;  // gradients may be dropped while the process ends
  return *held;
}

void add_held(SharedBuffer* buffer) {
  HeldBuffers& held = held_buffers();
  std::lock_guard lock(held.mutex);
  held.buffers.insert(buffer);
  held.count = held.buffers.size();
}

void remove_held(SharedBuffer* buffer) noexcept {
  HeldBuffers& held = held_buffers();
  std::lock_guard lock(held.mutex);
  held.buffers.erase(buffer);
  held.count = held.buffers.size();
}

}  // namespace

// What the storage of a delivered gradient owns.
struct SharedBuffer::Part {
  std::shared_ptr<SharedBuffer> buffer;
  int64_t offset;

  static void let_go(void* part) {
    std::unique_ptr<Part> owned(static_cast<Part*>(part));
    owned->buffer->drop(owned->offset);
  }
};

SharedBuffer::SharedBuffer(Buffer memory, std::shared_ptr<Delivery> delivery)
    : memory_(std::move(memory)), delivery_(std::move(delivery)) {
  if (delivery_) ++delivery_->num_contexts;
}

// A buffer with room for gradients is larger than the session needs once it allocates gradients.
SharedBuffer::~SharedBuffer() {
  end_context();
  remove_held(this);
  if (delivery_ && !delivery_->is_on) memory_.free();
}

c10::DataPtr SharedBuffer::hand_out(int64_t offset, int64_t bytes) {
  auto part = std::make_unique<Part>(Part{shared_from_this(), offset});
  bool is_first = false;
  {
    std::lock_guard lock(mutex_);
    is_first = parts_.empty();
    parts_[offset] = offset + bytes;
  }
  if (is_first) add_held(this);
  return {static_cast<char*>(data()) + offset, part.release(), &Part::let_go, memory_.device()};
}

void SharedBuffer::end_context() noexcept {
  std::lock_guard lock(mutex_);
  if (!std::exchange(in_context_, false)) return;
  if (delivery_) --delivery_->num_contexts;
}

void SharedBuffer::drop(int64_t offset) noexcept {
  std::lock_guard lock(mutex_);
  parts_.erase(offset);
  if (delivery_->num_contexts > (in_context_ ? 1 : 0)) delivery_->is_on = false;
  if (is_released_) release_dead();
}

void SharedBuffer::release_dead() noexcept {
  int64_t dead = 0;
  for (const auto& [begin, end] : parts_) {
    memory_.release_pages(dead, begin);
    dead = end;
  }
  memory_.release_pages(dead, memory_.capacity());
  is_released_ = true;
}

void release_dead_memory(bool for_a_context) noexcept {
  HeldBuffers& held = held_buffers();
  if (held.count == 0) return;
  std::lock_guard lock(held.mutex);
  for (SharedBuffer* buffer : held.buffers) {
    std::lock_guard buffer_lock(buffer->mutex_);
    if (buffer->in_context_ || buffer->parts_.empty()) continue;
    if (for_a_context) buffer->delivery_->is_on = false;
    if (!buffer->is_released_) buffer->release_dead();
  }
}

}  // namespace torch_ort::run
