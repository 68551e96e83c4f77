#include "run/autograd/python_op.h"

#include "base/error.h"
#include "run/autograd/node_pointer.h"
#include "run/guard.h"
#include "run/key_table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <atomic>
#include <memory>

namespace torch_ort::run {

namespace {

using Tensors = PythonFunction::Tensors;
using torch::autograd::Node;

KeyTable<PythonFunction>& function_table() {
  // Never destroyed, because Python frees objects that need it at its end.
  static auto* table = new KeyTable<PythonFunction>;
  return *table;
}

std::shared_ptr<const PythonFunction> find_function(int64_t key) {
  auto found = function_table().find(key);
  if (found == nullptr) {
    throw UserError(concat("PythonOp: no Function has the key ", key,
                           " in this process: its graph was captured in another one, or freed"));
  }
  return found;
}

// Runs that have found the function as it was keep that.
template <typename Change>
void change_function(int64_t key, Change change) {
  if (!function_table().change(key, change)) find_function(key);  // which throws
}

// What the storage of a Function's first result owns.
struct PythonContext {
  int64_t data;  // of the tensor, which nobody reads
  // None if no gradient is asked for.
  NodePtr node;
};

std::atomic<int64_t> live_contexts{0};

void end_python_context(void* data) {
  // A node that belongs to Python takes the GIL itself.
  delete static_cast<PythonContext*>(data);
  live_contexts.fetch_sub(1);
}

at::Tensor make_context(NodePtr node) {
  live_contexts.fetch_add(1);
  auto* context = new PythonContext{0, std::move(node)};
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), sizeof(int64_t),
      c10::DataPtr(&context->data, context, &end_python_context, c10::kCPU), nullptr, false));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(c10::ScalarType::Long));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({});
  return tensor;
}

PythonContext* context_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() != &end_python_context) return nullptr;
  return static_cast<PythonContext*>(data.get_context());
}

NodePtr node_of(const at::Tensor& tensor) {
  const PythonContext* context = context_of(tensor);
  if (context == nullptr) throw UserError("PythonOpGrad: the first input owns no forward call");
  ORT_CHECK(context->node != nullptr, "PythonOpGrad: the forward call kept nothing for backward");
  return context->node;
}

RaiseAgain raise_again_in_python = nullptr;

// The node that a Function's inputs come from. It is asked for the metadata of gradients, and never
// runs.
struct Outside : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw InternalError("PythonOp: backward went past the Function");
  }
};

// Makes the tensors that a Function gets. Memory of the engine is given as an alias, and serves
// other values after the step. If anything still refers to it then, in whatever way the Function
// saved it, it becomes a copy, and whoever refers to it sees the copy. Memory that its storage owns
// is shared. So are version counters, by which autograd notices edits of what was saved.
class Aliases {
 public:
  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return tensor;
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const c10::Storage& storage = tensor.storage();
    given_.push_back(storage.unsafeGetStorageImpl());
    const bool is_owned = storage.data_ptr().get_context() != nullptr || storage.nbytes() == 0;
    if (is_owned) {
      return at::Tensor(impl->shallow_copy_and_detach(
          impl->is_inference() ? c10::VariableVersion() : impl->version_counter(), true));
    }
    at::Tensor made(impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
    made.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_of_alias(storage));
    return made;
  }

  // Whether a tensor shares memory of an alias.
  bool shares(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return false;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    for (const c10::StorageImpl* given : given_) {
      if (storage == given) return true;
    }
    for (const Alias& alias : aliases_) {
      if (storage == alias.storage.unsafeGetStorageImpl()) return true;
    }
    return false;
  }

  void settle() {
    for (Alias& alias : aliases_) {
      if (alias.storage.use_count() == 1) continue;
      const c10::Device device = alias.storage.device();
      const auto bytes = static_cast<int64_t>(alias.storage.nbytes());
      const at::Tensor copy = at::for_blob(alias.storage.mutable_data(), {bytes})
                                  .options(at::TensorOptions().dtype(at::kByte).device(device))
                                  .target_device(device)
                                  .make_tensor()
                                  .clone();
      alias.storage.set_data_ptr_noswap(
          copy.storage().set_data_ptr(c10::DataPtr(nullptr, alias.storage.device())));
    }
    aliases_.clear();
  }

 private:
  struct Alias {
    const c10::StorageImpl* of;
    c10::Storage storage;
  };

  const c10::Storage& storage_of_alias(const c10::Storage& storage) {
    const c10::StorageImpl* of = storage.unsafeGetStorageImpl();
    for (const Alias& alias : aliases_) {
      if (alias.of == of) return alias.storage;
    }
    void* data = const_cast<void*>(storage.data());
    aliases_.push_back({of, c10::Storage(c10::make_intrusive<c10::StorageImpl>(
                                c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                c10::DataPtr(data, storage.device()),
                                c10::GetAllocator(storage.device_type()), false))});
    return aliases_.back().storage;
  }

  std::vector<const c10::StorageImpl*> given_;
  std::vector<Alias> aliases_;
};

// Sets the dispatch state in which eager PyTorch would call the Function. `autocast_off` has the
// keys by which autocast is off.
class PlainState {
 public:
  PlainState(bool grad_mode, c10::DispatchKeySet autocast_off)
      : callers_(CallersState::leave()), plain_(state(autocast_off)), mode_(grad_mode) {}

 private:
  static c10::impl::LocalDispatchKeySet state(c10::DispatchKeySet autocast_off) {
    c10::impl::LocalDispatchKeySet keys{c10::impl::PODLocalDispatchKeySet{}};
    keys.excluded_ = (keys.excluded_ - c10::autocast_dispatch_keyset) | autocast_off;
    return keys;
  }

  CallersState callers_;
  c10::impl::ForceDispatchKeyGuard plain_;
  c10::AutoGradMode mode_;
};

at::Tensor detached(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(
      impl->is_inference() ? c10::VariableVersion() : impl->version_counter(), true));
}

at::Tensor private_copy(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::clone(tensor);
}

bool share_memory(const Tensors& tensors, const at::Tensor& tensor) {
  for (const at::Tensor& other : tensors) {
    if (other.defined() && other.is_alias_of(tensor)) return true;
  }
  return false;
}

// The results for the following steps. Each gets memory of its own, as the plan assumes.
Tensors take_outputs(const PythonFunction& function, const Aliases& aliases, const Tensors& results,
                     NodePtr& node) {
  TORCH_CHECK(results.size() == function.num_results, function.name, ": forward gave ",
              results.size(), " results, ", function.num_results, " when its graph was captured");
  Tensors outputs;
  for (int position : function.outputs) {
    const at::Tensor& result = results[position];
    TORCH_CHECK(result.defined(), function.name, ": result ", position,
                " of forward is no tensor, which it was when its graph was captured");
    if (node == nullptr && result.requires_grad()) node = result.grad_fn();
    at::Tensor output = detached(result);
    if (aliases.shares(output) || share_memory(outputs, output)) output = private_copy(output);
    outputs.push_back(std::move(output));
  }
  return outputs;
}

std::pair<at::Tensor, Tensors> call_forward(const PythonFunction& function, const Tensors& tensors,
                                            const std::vector<int64_t>& sizes) {
  ORT_CHECK(tensors.size() == function.requires_grad.size(), function.name, ": got ",
            tensors.size(), " tensors, want ", function.requires_grad.size());
  Aliases aliases;
  Tensors inputs;
  NodePtr outside;
  for (size_t i = 0; i < tensors.size(); ++i) {
    inputs.push_back(aliases.alias(function.written[i] ? private_copy(tensors[i]) : tensors[i]));
    if (!function.requires_grad[i]) continue;
    if (outside == nullptr) outside = make_node<Outside>();
    const uint32_t number = outside->add_input_metadata(inputs.back());
    torch::autograd::impl::set_gradient_edge(inputs.back(), torch::autograd::Edge(outside, number));
  }
  NodePtr node;
  Tensors outputs;
  {
    // What is called enters the autocast under which the graph was captured.
    const PlainState state(function.grad_mode, c10::autocast_dispatch_keyset);
    try {
      function.call(std::move(inputs), sizes, [&](const Tensors& results) {
        outputs = take_outputs(function, aliases, results, node);
      });
    } catch (...) {
      raise_again_in_python(function.name);
    }
  }
  aliases.settle();
  return {make_context(std::move(node)), std::move(outputs)};
}

Tensors run_node(Node& node, Tensors gradients) {
  gradients.resize(node.num_inputs());
  Tensors results = node(std::move(gradients));
  torch::autograd::validate_outputs(
      node.next_edges(), results,
      [&node](const std::string& message) { return concat("Function ", node.name(), message); });
  return results;
}

// One gradient for each position that the capture knows of. Each gets memory of its own, since
// autograd stores what it gets as `.grad`.
Tensors take_gradients(const PythonFunction& function, const Node& node, const Aliases& aliases,
                       const Tensors& results) {
  Tensors gradients;
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const bool is_known =
        next < function.gradients.size() && function.gradients[next] == static_cast<int>(i);
    const torch::autograd::Edge& edge = node.next_edge(i);
    if (!is_known) {
      TORCH_CHECK(!results[i].defined() || !edge.is_valid(), function.name,
                  ": backward gave a gradient for tensor ", i,
                  ", for which it gave None when its graph was captured");
      continue;
    }
    ++next;
    at::Tensor gradient = results[i];
    if (!gradient.defined()) {
      gradient = edge.function->input_metadata(edge.input_nr).zeros_like();
    } else if (gradient.requires_grad() || gradient.use_count() > 2 || aliases.shares(gradient) ||
               (gradient.has_storage() && gradient.storage().use_count() > 1)) {
      // `results` and `gradient` are two references.
      gradient = private_copy(gradient);
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

Tensors call_backward(const PythonFunction& function, const at::Tensor& context,
                      const Tensors& given) {
  const NodePtr node = node_of(context);
  ORT_CHECK(given.size() == function.outputs.size(), function.name, ": got ", given.size(),
            " gradients, want ", function.outputs.size());
  Aliases aliases;
  Tensors inputs(function.num_results);
  for (size_t i = 0; i < given.size(); ++i) {
    inputs[function.outputs[i]] = aliases.alias(given[i]);
  }
  Tensors gradients;
  {
    const PlainState state(false, CallersState::off());
    try {
      const Tensors results = run_node(*node, std::move(inputs));
      gradients = take_gradients(function, *node, aliases, results);
    } catch (...) {
      raise_again_in_python(function.name);
    }
  }
  aliases.settle();
  return gradients;
}

void python_op(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const int64_t key = torch::jit::pop(*stack).toInt();
  const std::vector<int64_t> sizes = torch::jit::pop(*stack).toIntVector();
  const Tensors tensors = torch::jit::pop(*stack).toTensorVector();
  auto [context, outputs] = call_forward(*find_function(key), tensors, sizes);
  torch::jit::push(*stack, std::move(context), std::move(outputs));
}

void python_op_grad(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const int64_t key = torch::jit::pop(*stack).toInt();
  const c10::IValue gradients = torch::jit::pop(*stack);
  Tensors given;
  for (const c10::IValue& item : gradients.toListRef()) {
    given.push_back(item.isNone() ? at::Tensor() : item.toTensor());
  }
  const at::Tensor context = torch::jit::pop(*stack).toTensor();
  torch::jit::push(*stack, call_backward(*find_function(key), context, given));
}

}  // namespace

int64_t add_python_function(PythonFunction function) {
  return function_table().add(std::move(function));
}

void remove_python_function(int64_t key) { function_table().remove(key); }

void set_form(int64_t key, std::vector<bool> written, std::vector<int> outputs,
              size_t num_results) {
  change_function(key, [&](PythonFunction& function) {
    function.written = std::move(written);
    function.outputs = std::move(outputs);
    function.num_results = num_results;
  });
}

void set_gradients(int64_t key, std::vector<int> positions) {
  change_function(key,
                  [&](PythonFunction& function) { function.gradients = std::move(positions); });
}

Tensors run_grad_fn(const at::Tensor& output, Tensors gradients) {
  const NodePtr node = output.grad_fn();
  ORT_CHECK(node != nullptr, "run_grad_fn: the tensor was made by no Function");
  return run_node(*node, std::move(gradients));
}

bool is_python_context(const at::Tensor& tensor) { return context_of(tensor) != nullptr; }

int64_t num_python_contexts() { return live_contexts.load(); }

void set_raise_again(RaiseAgain raise_again) { raise_again_in_python = raise_again; }

TORCH_LIBRARY_FRAGMENT(torch_ort, library) {
  library.def(
      "python_op(Tensor[] tensors, SymInt[] sizes, int function) -> (Tensor ctx, Tensor[] outputs)",
      {at::Tag::pt2_compliant_tag});
  library.def("python_op_grad(Tensor ctx, Tensor?[] grads, int function) -> Tensor[]",
              {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_ort, CompositeExplicitAutograd, library) {
  library.impl("python_op", torch::CppFunction::makeFromBoxedFunction<&python_op>());
  library.impl("python_op_grad", torch::CppFunction::makeFromBoxedFunction<&python_op_grad>());
}

}  // namespace torch_ort::run
