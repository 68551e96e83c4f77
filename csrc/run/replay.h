// Runs the halves of a binding as CUDA graphs (option cuda_graphs), so that the host queues one
// graph where it would queue hundreds of kernels.
//
// The third run of a part (a half, or the segment of a backward half whose gradients leave
// together) is captured; later runs replay what was captured, as long as everything that it reads
// and writes is where it was:
//
// - What the plan places is in memory that the graphs keep. One call at a time has it, from its
//   forward to the end of its backward. A second call that is alive meanwhile runs without graphs,
//   in memory of its own.
// - What kernels allocate is in the graph's own memory, and stays valid until the next replay. If
//   somebody still holds such a tensor, as he does if gradients are added up over several calls,
//   a second graph is captured, and with more of them held the part runs without.
// - Outputs are copied into new memory, since a loop commonly holds its last loss and logits while
//   the next call runs. Gradients are not copied.
// - Tensors of the caller (inputs, parameters, incoming gradients) are compared by address. If one
//   has moved, the part is captured anew; one that moves again is copied to where the graph reads
//   it, unless the graph writes into it or too many bytes would be copied.
//
// So a replay cannot differ from a run: whatever does not fit runs step by step. That kernels get
// new addresses in their parameters instead (cuGraphExecKernelNodeSetParams) was left out, because
// the parameters of PyTorch's kernels cannot be told apart.
//
// Memory is the price. Activations and gradients do not share it, other programs do not get it
// between calls, and a graph of each size has its own. A stream that reads a gradient after its
// tensor is gone is not waited for, unlike memory of PyTorch's allocator after `record_stream`.
#pragma once

#include "run/binding.h"
#include "run/context.h"
#include "run/device_graph.h"
#include "run/memory/arena.h"
#include "run/replay_report.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace torch_ort::run {

class Replay {
 public:
  explicit Replay(const Binding& binding);
  ~Replay();
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Gives a new context the memory of the graphs, until Context::clear() takes it back. Returns
  // false if the context has to run without graphs: another one has the memory, the stream is
  // another one or is being captured, or no part can be captured.
  bool lend(Context& context);
  void take_back() noexcept;

  // Runs a part in a context that has the memory.
  void run(Context& context, StepRange range);

  // Frees graphs and memory, unless a context has them.
  void free_idle();

  ReplayReport report() const;

 private:
  struct Captured;
  struct Part;
  using Tensors = std::vector<at::Tensor>;

  c10::DeviceIndex device() const;
  void allocate_memory();
  void attach_memory(Context& context) const;

  Part& part_of(const Context& context, StepRange range);
  // `given` are the tensors that the part reads.
  static void note_addresses(const Tensors& given, Part& part);
  const Captured* find_or_capture(Context& context, Part& part);
  static const Captured* find(Part& part);
  const Captured* capture(Context& context, Part& part, const Tensors& given) const;
  static std::string why_not_captured(const Part& part, const Tensors& given);
  void list_left(Context& context, const Part& part, const Tensors& before, const Tensors& given,
                 Captured& captured) const;
  void replay(Context& context, const Part& part, const Captured& captured,
              const Tensors& given) const;

  const Binding& binding_;
  std::string refused_;
  std::vector<bool> is_callers_, is_written_, is_output_;  // by slot

  std::atomic<bool> is_lent_{false};
  // What follows belongs to whoever has set is_lent_.
  std::optional<c10::Stream> stream_;
  std::vector<std::shared_ptr<SharedBuffer>> chunks_;
  Buffer scratch_;
  std::map<StepRange, std::unique_ptr<Part>> parts_;

  mutable std::mutex mutex_;  // guards the following member
  std::map<StepRange, ReplayReport::Part> report_;
};

}  // namespace torch_ort::run
