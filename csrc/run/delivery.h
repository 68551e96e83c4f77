// Gradients that leave in engine memory.
//
// A buffer is shared: a context runs in it, and the gradients of its backward lie where the context
// needs nothing more. It goes back to the pool when all have let go of it. A training loop that
// drops its gradients before the next forward call thus runs in one buffer, step after step.
//
// In other loops the dead parts of such buffers would only add to the memory in use. They go back
// to the system then, and the session delivers no more: see Delivery.
#pragma once

#include "run/arena.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

namespace torch_ort::run {

// Whether a session delivers gradients; shared by it and its buffers. It stops for good when a
// context needs memory while gradients hold a buffer that no context uses (they are dropped late,
// or kept), and when a gradient is dropped while another context of the session waits (the calls
// share parameters, whose gradients are summed).
struct Delivery {
  std::atomic<bool> is_on{true};
  std::atomic<int64_t> num_contexts{0};  // that use a buffer
  // Whether those of each segment of the last backward were dropped before the next one ran: so
  // they need the memory of one segment, wherever it is.
  std::atomic<bool> is_dropped_early{false};
};

class SharedBuffer : public std::enable_shared_from_this<SharedBuffer> {
 public:
  // `delivery`: nullptr if nothing in it will be handed out.
  SharedBuffer(Buffer memory, std::shared_ptr<Delivery> delivery);
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  void* data() const { return memory_.data(); }
  // The memory [offset, offset + bytes), which keeps the buffer. Needs no GIL to be dropped.
  c10::DataPtr hand_out(int64_t offset, int64_t bytes);
  // The context is done: all that is not handed out is dead.
  void end_context() noexcept;

 private:
  friend void release_dead_memory(bool for_a_context) noexcept;
  struct Part;
  void drop(int64_t offset) noexcept;
  void release_dead() noexcept;

  Buffer memory_;
  std::shared_ptr<Delivery> delivery_;
  std::mutex mutex_;                  // of what follows
  std::map<int64_t, int64_t> parts_;  // handed out: begin and end
  bool in_context_ = true;
  bool is_released_ = false;  // what is dead has gone back to the system
};

// Gives the memory that is dead in buffers held by gradients alone back to the system. Where it is
// a context that needs memory, their sessions stop delivering.
void release_dead_memory(bool for_a_context) noexcept;

}  // namespace torch_ort::run
