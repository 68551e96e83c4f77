// Returns gradients to the caller in engine memory.
//
// A buffer is shared: a context runs in it, and the gradients of its backward half are placed where
// the context needs nothing any more. The buffer returns to the pool when all have released it. So
// a training loop that drops its gradients before the next forward call runs in one buffer, step
// after step.
//
// In other loops the dead parts of such buffers would only add to the memory in use. Then they are
// returned to the system, and the session stops delivering gradients; see Delivery.
//
// On a GPU gradients are not delivered. The context area consists of chunks there (plan::Chunk),
// and backward frees each after the last use of what is in it, so that gradients get the memory of
// dead activations, as in eager PyTorch. Delivery would cost more than it gains: gradients that are
// summed over several calls would hold the activations' memory, as would an optimizer step, whose
// temporaries need memory too; parts of a block cannot be given back as pages can; and PyTorch's
// `record_stream` does not know memory that its allocator has not handed out, so that a stream that
// still reads a gradient could not be waited for. For the same reasons chunks come from PyTorch's
// allocator: memory that the engine kept for the next call would be missing in between. The
// allocator returns the same blocks as long as sizes repeat. The states that an optimizer makes in
// its first step are cut out of free chunks, so that the second step allocates some anew. Chunks of
// one size, and chunks that are kept over the first step, were tried against the allocator's rules
// and held more memory (benchmarks/results/decisions.md).
#pragma once

#include "run/memory/arena.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

namespace torch_ort::run {

// Whether a session delivers gradients. It is shared by the session and its buffers. Delivery stops
// for good in two cases: when a context needs memory while gradients hold a buffer that no context
// uses, because gradients are dropped after the next forward call or kept; and when a gradient is
// dropped while another context of the session waits, because these calls share parameters, whose
// gradients are summed.
struct Delivery {
  std::atomic<bool> is_on{true};
  std::atomic<int64_t> num_contexts{0};  // contexts that use a buffer
  // Whether the last backward call's gradients of each segment were dropped before the next segment
  // ran. Then they need only the memory of one segment.
  std::atomic<bool> is_dropped_early{false};
};

class SharedBuffer : public std::enable_shared_from_this<SharedBuffer> {
 public:
  // `delivery` is nullptr if the buffer will hand out nothing.
  SharedBuffer(Buffer memory, std::shared_ptr<Delivery> delivery);
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  void* data() const { return memory_.data(); }
  // Hands out the memory [offset, offset + bytes). The result keeps the buffer alive; it may be
  // dropped without the GIL.
  c10::DataPtr hand_out(int64_t offset, int64_t bytes);
  // The context has ended: all memory that is not handed out is dead.
  void end_context() noexcept;

 private:
  friend void release_dead_memory(bool for_a_context) noexcept;
  struct Part;
  void drop(int64_t offset) noexcept;
  void release_dead() noexcept;

  Buffer memory_;
  std::shared_ptr<Delivery> delivery_;
  std::mutex mutex_;                  // guards the following members
  std::map<int64_t, int64_t> parts_;  // what is handed out: begin and end
  bool in_context_ = true;
  bool is_released_ = false;  // the dead parts were returned to the system
};

// Returns to the system the dead memory of buffers that only gradients hold. If it is a context
// that needs memory, the sessions of these buffers stop delivering.
void release_dead_memory(bool for_a_context) noexcept;

}  // namespace torch_ort::run
