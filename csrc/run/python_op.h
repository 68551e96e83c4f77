// Calls of torch.autograd.Function as steps of a graph: com.microsoft.PythonOp and PythonOpGrad.
// The autograd node that a forward call makes is its context; it lives as long as the tensor that
// forward gives besides its outputs. Only what python/ hands over here enters the interpreter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_ort::run {

// A Function with everything that is no tensor filled in, as one graph calls it.
struct PythonFunction {
  using Tensors = std::vector<at::Tensor>;
  // Takes all that forward returned, undefined where that is no tensor, while the GIL is held.
  using Take = c10::function_ref<void(const Tensors&)>;
  using Call = std::function<void(Tensors tensors, const std::vector<int64_t>& sizes, Take take)>;

  std::string name;
  Call call;
  std::vector<bool> requires_grad;  // by tensor
  std::vector<bool> written;        // by tensor: whether forward writes into it
  bool grad_mode = false;
  std::vector<int> outputs;    // positions of the tensors among what forward returns
  size_t num_results = 0;      // that forward returns
  std::vector<int> gradients;  // positions of the tensors that backward gives a gradient for
};

// Gives the key by which the operators torch_ort::python_op and python_op_grad find it.
int64_t add_python_function(PythonFunction function);
void remove_python_function(int64_t key);
// What capture has learnt of it.
void set_form(int64_t key, std::vector<bool> written, std::vector<int> outputs, size_t num_results);
void set_gradients(int64_t key, std::vector<int> positions);

// Runs the backward of the Function that made `output`. One gradient for each thing that forward
// returned in, one for each tensor that it was called with out; both may be undefined.
PythonFunction::Tensors run_grad_fn(const at::Tensor& output, PythonFunction::Tensors gradients);

// Whether a tensor owns the context of a call.
bool is_python_context(const at::Tensor& tensor);
// Keeps a context whose tensor a saved-tensor hook may copy and drop, until its backward has run.
void hold_python_context(const at::Tensor& tensor);
int64_t num_python_contexts();

// Raises the exception that is being handled again, as one of Python's which is marked as coming
// from a Function: nothing but the user's program has failed. Set when the module is loaded.
using RaiseAgain = void (*)(const std::string& name);
void set_raise_again(RaiseAgain raise_again);

}  // namespace torch_ort::run
