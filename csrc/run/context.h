// Bindings and contexts; internal to run/.
#pragma once

#include "region/codegen.h"
#include "run/delivery.h"
#include "run/partial_backward.h"
#include "run/placement.h"
#include "run/session.h"
#include "run/spec.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <memory>
#include <mutex>
#include <vector>

namespace torch_ort::run {

// An argument with all sizes filled in.
struct BoundArg {
  enum class Kind : uint8_t { kConstant, kSlot, kTensorList, kLateDim, kLateDimList } kind;
  int slot = -1;
  c10::IValue constant;
  const ArgSource* source = nullptr;  // of lists, and of dims that are known only in the run
};

// A part of another tensor, and what looks at all of that part.
struct PartSpec {
  ViewSpec place;
  int whole = -1;
};

struct BoundStep {
  const Step* step = nullptr;
  Form form = Form::kFunctional;  // kReshape is decided: kView, kFunctional or kOut
  std::vector<BoundArg> args;
  std::vector<int> allocate;  // slots that get memory of their own before the call
  std::vector<int> release;   // slots to let go afterwards
  // Parts of the context memory that may go back to the system afterwards.
  std::vector<plan::Discard> discards;
  int takes_over = -1;  // slot of an adopted tensor that the result is written into
  // Nothing is left to do: its result looks at engine memory, or has come with its parts.
  bool is_done = false;
  std::vector<ViewSpec> views;  // of a view of the caller's memory, or of adopted memory
  int viewed = -1;              // the slot that these look at
  std::vector<PartSpec> parts;  // its results in tensors of the caller
  std::vector<ViewSpec> rest;   // of form kParts: which slots are copied to where in the whole
  std::shared_ptr<const region::Kernel> kernel;  // of a region
  std::optional<AllocationNumbers> numbers;      // of form kPlaced
  std::vector<plan::Workspace> workspaces;       // of the same
};

struct Binding : std::enable_shared_from_this<Binding> {
  Session* session = nullptr;
  std::weak_ptr<Session> owner;
  std::vector<std::pair<std::string, int64_t>> symbols;
  std::vector<TensorSpec> inputs;  // to recognise the sizes again
  std::vector<int64_t> symbol_inputs;
  std::vector<TensorSpec> specs;  // by slot
  plan::Program program;
  std::vector<int> delivered;  // by gradient: the slot whose memory leaves; -1: see Describer
  bool delivers = false;       // made for a session that may deliver
  std::vector<BoundStep> forward, backward;
  plan::Plan plan;
  double plan_ms = 0;
  std::vector<int> static_views;  // steps whose result is made with the context
  std::vector<int> owned;         // slots with a place of their own in engine memory
  std::vector<PartSpec> parts;    // of these
  std::vector<int> transient;     // slots that are filled anew in each call
  std::vector<const ViewSpec*> moving_views;
  std::vector<int> kept;  // of these, what the engine keeps for backward
  int64_t serial = 0;     // tells bindings of one session apart

  std::mutex mutex;
  std::vector<std::unique_ptr<Context>> idle;

  bool matches(const Session::Tensors& inputs, const std::vector<int64_t>& symbols) const;
  std::unique_ptr<Context> take_context();
};

// The tensors of one forward call and its backward.
struct Context {
  explicit Context(std::shared_ptr<Binding> binding);

  // While the context is in use: the session whose plan it follows, and the one that was called.
  std::shared_ptr<Session> session;
  std::shared_ptr<const Session> called;
  std::shared_ptr<const ExpectedBackward> expected;  // that of `session`, where they differ
  std::shared_ptr<Binding> binding;
  std::vector<at::Tensor> slots;
  std::vector<at::Tensor> views;  // by slot: the tensor objects of moving views
  std::vector<std::pair<std::string, int64_t>> late_symbols;  // bound in the run
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

  std::optional<int64_t> symbol(const std::string& name) const;
  void attach_context_memory(void* data);
  void attach_scratch(void* data);
  void let_go_of_views();
  // Lets go of everything but the tensor objects over engine memory.
  void clear();

 private:
  void attach(std::vector<Part>& parts, void* data);
};

// Points the views of a step at what they look at; false if that has other strides than were
// planned.
bool move_views(Context& context, const BoundStep& bound);

// Views of engine memory are metadata: made once, right for any address.
void make_static_view(Context& context, const Step& step);

// Runs the steps of one half. `stack` discipline, releases and late symbols are its business.
void run_steps(Context& context, const std::vector<BoundStep>& steps);

}  // namespace torch_ort::run
