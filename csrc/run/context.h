// The tensors of one forward call and its backward; internal to run/.
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

  // While the context is in use: the session whose plan it follows, and the one that was called.
  std::shared_ptr<Session> session;
  std::shared_ptr<const Session> called;
  std::shared_ptr<const ExpectedBackward> expected;  // that of `session`, where they differ
  std::shared_ptr<Binding> binding;
  std::vector<at::Tensor> slots;
  std::vector<at::Tensor> views;  // by slot: the tensor objects of moving views
  std::vector<std::pair<std::string, int64_t>> unbacked_symbols;  // bound in the run
  // Each planned tensor is alone in its storage, as in eager PyTorch: kernels that look at the
  // whole storage, or count from its start, find what they expect. Only the addresses move.
  struct Part {
    c10::Storage storage;
    int64_t offset = 0;  // bytes into the area
  };
  std::vector<Part> context_parts, scratch_parts;
  char* context_data = nullptr;  // where the parts lie now
  char* scratch_data = nullptr;
  c10::Storage empty_storage;
  std::shared_ptr<SharedBuffer> context_memory;
  torch::jit::Stack stack;
  std::mutex mutex;    // one run at a time
  bool spent = false;  // backward has overwritten what it needs
  // A step has raised, after which a tensor object may not be as it was made: kernels resize what
  // they write into before they find that they cannot. The context is used no more.
  bool failed = false;

  const CompiledGraph& graph() const { return *binding->graph; }
  const TensorSpec& spec(int slot) const { return binding->specs[slot]; }
  std::optional<int64_t> symbol(const std::string& name) const;
  // Puts a result into its slot; the sizes of an unbacked one bind its symbols.
  void store(int slot, at::Tensor tensor);
  // Points the object of a view, or of a part, at memory.
  void point(const ViewSpec& view, const c10::Storage& storage, int64_t offset);

  void attach_context_memory(void* data);
  void attach_scratch(void* data);
  void let_go_of_views();
  // Lets go of everything but the tensor objects over engine memory.
  void clear();

 private:
  void bind_unbacked_symbols(int slot);
  void attach(std::vector<Part>& parts, void* data);
};

// Runs steps of one half. `stack` discipline, releases and unbacked symbols are its business.
void run_steps(Context& context, std::span<const BoundSteps::value_type> steps);

}  // namespace torch_ort::run
