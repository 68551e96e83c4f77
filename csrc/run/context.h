// The tensors of one forward call and its backward calls; internal to run/. A binding pools its
// contexts.
#pragma once

#include "run/binding.h"
#include "run/delivery.h"
#include "run/partial_backward.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torch_ort::run {

class Session;

struct Context {
  explicit Context(std::shared_ptr<Binding> binding);

  // While the context is in use: the session whose plan it follows, and the session that was
  // called. They differ if only some outputs are expected to get gradients (partial_backward.h).
  std::shared_ptr<Session> session;
  std::shared_ptr<const Session> called;
  std::shared_ptr<const ExpectedBackward> expected;  // of `session`, if the two differ
  std::shared_ptr<Binding> binding;
  std::vector<at::Tensor> slots;
  std::vector<at::Tensor> views;  // by slot: the tensors of moving views
  std::vector<std::pair<std::string, int64_t>> unbacked_symbols;  // bound in the run
  // Each planned tensor has a storage of its own, as in eager PyTorch, since some kernels look at
  // the whole storage or count from its start. A run only changes the addresses of the storages.
  struct Part {
    c10::Storage storage;
    int64_t offset = 0;  // bytes into the area
  };
  std::vector<Part> context_parts, scratch_parts;
  char* context_data = nullptr;  // the addresses of the areas, as last attached
  char* scratch_data = nullptr;
  c10::Storage empty_storage;
  std::shared_ptr<SharedBuffer> context_memory;
  torch::jit::Stack stack;
  std::mutex mutex;    // held while steps run
  bool spent = false;  // backward has overwritten what it reads
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

  void attach_context_memory(void* data);
  void attach_scratch(void* data);
  void let_go_of_views();
  // Releases everything but the tensors over engine memory.
  void clear();

 private:
  void bind_unbacked_symbols(int slot);
  void attach(std::vector<Part>& parts, void* data);
};

// Runs steps of one half. It keeps `stack` balanced, releases slots and binds unbacked symbols.
void run_steps(Context& context, std::span<const BoundSteps::value_type> steps);

}  // namespace torch_ort::run
