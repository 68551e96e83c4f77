// The operators that represent the two halves in graphs that trace them: stubs, compiled autograd.
// Their fake kernels are in torch_ort/steps/stubs.py.
#include "run/session.h"

#include <ATen/core/stack.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

namespace torch_ort::run {

namespace {

void run_forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const bool packs = torch::jit::pop(*stack).toBool();
  const std::vector<int64_t> symbols = torch::jit::pop(*stack).toIntVector();
  const Session::Tensors inputs = torch::jit::pop(*stack).toTensorVector();
  const int64_t session = torch::jit::pop(*stack).toInt();
  torch::jit::push(*stack, find_session(session)->forward(inputs, symbols, packs));
}

void run_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Session::Tensors tangents = torch::jit::pop(*stack).toTensorVector();
  const Session::Tensors saved = torch::jit::pop(*stack).toTensorVector();
  const at::Tensor token = torch::jit::pop(*stack).toTensor();
  // The session is for the fake kernel. In a real call the token names its context.
  torch::jit::pop(*stack);
  // Outside of a backward pass autograd says "keep", which is safe.
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  torch::jit::push(*stack, Session::backward(token, saved, tangents, keep));
}

}  // namespace

TORCH_LIBRARY(torch_ort, library) {
  // Results may be views of the arguments, as the results of the program may.
  library.def(
      "run_forward(int session, Tensor(a -> *)[] inputs, int[] symbols, bool packs) -> Tensor(a)[]",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "run_backward(int session, Tensor token, Tensor(a -> *)[] saved, Tensor(a -> *)[] tangents) "
      "-> Tensor(a)[]",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_ort, CompositeExplicitAutograd, library) {
  library.impl("run_forward", torch::CppFunction::makeFromBoxedFunction<&run_forward>());
  library.impl("run_backward", torch::CppFunction::makeFromBoxedFunction<&run_backward>());
}

}  // namespace torch_ort::run
