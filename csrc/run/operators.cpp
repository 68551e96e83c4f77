// The registered operators behind the stubs that AOTAutograd runs. Their fake kernels are in torch_ort/capture.
#include <ATen/core/List.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "run/session.h"

namespace torch_ort::run {

namespace {

Session::Tensors tensors_of(const c10::IValue& list) {
  Session::Tensors tensors;
  const auto elements = list.toListRef();
  tensors.reserve(elements.size());
  for (const c10::IValue& element : elements) {
    tensors.push_back(element.isNone() ? at::Tensor() : element.toTensor());
  }
  return tensors;
}

c10::IValue list_of(Session::Tensors&& tensors) {
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(tensors.size());
  for (at::Tensor& tensor : tensors) {
    list.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt);
  }
  return list;
}

void run_forward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const bool carry = torch::jit::pop(*stack).toBool();
  const std::vector<int64_t> symbols = torch::jit::pop(*stack).toIntVector();
  const Session::Tensors inputs = tensors_of(torch::jit::pop(*stack));
  const int64_t session = torch::jit::pop(*stack).toInt();
  torch::jit::push(*stack, list_of(find_session(session)->forward(inputs, symbols, carry)));
}

void run_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  Session::Tensors tangents = tensors_of(torch::jit::pop(*stack));
  Session::Tensors saved = tensors_of(torch::jit::pop(*stack));
  const at::Tensor token = torch::jit::pop(*stack).toTensor();
  // Outside a backward pass autograd says "keep", the safe answer.
  const bool keep = torch::autograd::get_current_graph_task_keep_graph();
  torch::jit::push(*stack, list_of(Session::backward(token, saved, tangents, keep)));
}

}  // namespace

TORCH_LIBRARY(torch_ort, library) {
  library.def("run_forward(int session, Tensor?[] inputs, int[] symbols, bool carry) -> Tensor?[]",
              {at::Tag::pt2_compliant_tag});
  library.def("run_backward(Tensor token, Tensor[] saved, Tensor?[] tangents) -> Tensor?[]",
              {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(torch_ort, CompositeExplicitAutograd, library) {
  library.impl("run_forward", torch::CppFunction::makeFromBoxedFunction<&run_forward>());
  library.impl("run_backward", torch::CppFunction::makeFromBoxedFunction<&run_backward>());
}

}  // namespace torch_ort::run
