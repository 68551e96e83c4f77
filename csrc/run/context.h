// The tensors of one forward call and its backward calls; internal to run/. A binding pools its
// contexts.
//
// Tensor objects are made once with a context: a run only sets addresses. Views of engine memory
// are made once as well, and views of inputs are redirected to the memory of each call. A context
// never holds inputs: autograd saves them itself.
#pragma once

#include "run/binding.h"
#include "run/counters.h"
#include "run/memory/delivery.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

class Session;
struct Variant;

struct Context {
  explicit Context(std::shared_ptr<Binding> binding);

  // While a call of a session uses the context: the session, and the variant of it that the call
  // follows.
  std::shared_ptr<Session> called;
  std::shared_ptr<const Variant> variant;
  std::shared_ptr<Binding> binding;
  std::vector<at::Tensor> slots;
  std::vector<at::Tensor> views;  // by slot: the tensors of moving views
  std::vector<std::pair<std::string, int64_t>> unbacked_symbols;  // bound in the run
  // Each planned tensor has a storage of its own, as in eager PyTorch, since some kernels look at
  // the whole storage or count from its start. A run only changes the addresses of the storages.
  struct Part {
    c10::Storage storage;
    int64_t offset = 0;  // bytes into the memory
  };
  // A chunk of the context area.
  struct ChunkMemory {
    std::shared_ptr<SharedBuffer> buffer;
    std::vector<Part> parts;
  };
  std::vector<ChunkMemory> chunks;
  std::vector<Part> scratch_parts;
  char* scratch_data = nullptr;  // as last attached
  c10::Storage empty_storage;
  torch::jit::Stack stack;
  // Results of collectives that nobody has waited for yet (steps/collective.h).
  struct Flight {
    at::Tensor result;
    std::chrono::steady_clock::time_point start;
  };
  std::vector<Flight> in_flight;
  std::mutex mutex;    // held while steps run
  bool spent = false;  // backward has overwritten what it reads
  // It has the memory of the binding's graphs (replay.h), and whether its forward half was one.
  bool replays = false, is_replayed = false;
  // A step has thrown. Its tensors may have been changed, since kernels resize a result before they
  // find that they cannot. The context is not used again.
  bool failed = false;

  const CompiledGraph& graph() const { return *binding->graph; }
  const TensorSpec& spec(int slot) const { return binding->specs[slot]; }
  std::optional<int64_t> symbol(const std::string& name) const;
  // Stores a result in its slot. The sizes of an unbacked one bind its symbols.
  void store(int slot, at::Tensor tensor);
  // Makes the tensor of a view or of a part refer to memory.
  void point(const ViewSpec& view, const c10::Storage& storage, int64_t offset);

  // The address of the context area if it is one chunk; nullptr without memory.
  char* context_data() const;
  void attach_chunk(size_t index, std::shared_ptr<SharedBuffer> buffer);
  // Frees the memory of a chunk, in which nothing is needed any more.
  void release_chunk(size_t index);
  // The parts of the chunks that hold what crosses the border, in order, as tensors of bytes.
  std::vector<at::Tensor> crossing_bytes() const;
  void attach_scratch(void* data);
  void let_go_of_views();
  // Releases the tensors in slots that the engine does not keep for backward.
  void release_all_but_kept();
  // Releases everything but the tensors over engine memory.
  void clear();

 private:
  void bind_unbacked_symbols(int slot);
  void attach(std::vector<Part>& parts, void* data);
};

// Runs steps of one half. It keeps `stack` balanced, releases slots and binds unbacked symbols.
// Returns their counts, which it has added to the counters.
StepCounts run_steps(Context& context, std::span<const BoundSteps::value_type> steps);

}  // namespace torch_ort::run
