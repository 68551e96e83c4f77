// Calls of torch.autograd.Function as steps of a graph: com.microsoft.PythonOp and PythonOpGrad.
// The context of a call is the autograd node that it creates, which lives as long as the additional
// first result of PythonOp. Only functions that python/ registers here enter the interpreter.
//
// So contexts live exactly as long as what the engine saves for backward. The Function gets tensors
// over engine memory whose storages are their own. If anything still refers to such a storage after
// the call, its address is changed to that of a copy. So it is safe however a Function keeps its
// arguments, and costs nothing if it keeps none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch_ort::run {

// A Function as one graph calls it, with all arguments but tensors bound.
struct PythonFunction {
  using Tensors = std::vector<at::Tensor>;
  // Receives all that forward returned, undefined for what is not a tensor. Called with the GIL
  // held.
  using Take = c10::function_ref<void(const Tensors&)>;
  using Call = std::function<void(Tensors tensors, const std::vector<int64_t>& sizes, Take take)>;

  std::string name;
  Call call;
  std::vector<bool> requires_grad;  // by tensor argument
  std::vector<bool> written;        // by tensor argument: whether forward writes into it
  bool grad_mode = false;
  std::vector<int> outputs;  // positions of the tensors among the results of forward
  size_t num_results = 0;    // of forward
  // Positions of the tensor arguments for which backward returns a gradient.
  std::vector<int> gradients;
};

// Registers a function and returns the key by which the operators torch_ort::python_op and
// python_op_grad find it.
int64_t add_python_function(PythonFunction function);
void remove_python_function(int64_t key);
// Set what the capture has learned about the function.
void set_form(int64_t key, std::vector<bool> written, std::vector<int> outputs, size_t num_results);
void set_gradients(int64_t key, std::vector<int> positions);

// Runs the backward of the Function whose forward returned `output`. Takes one gradient for each
// result of forward and returns one for each tensor argument; any of these may be undefined.
PythonFunction::Tensors run_grad_fn(const at::Tensor& output, PythonFunction::Tensors gradients);

// Whether the tensor owns the context of a call.
bool is_python_context(const at::Tensor& tensor);
int64_t num_python_contexts();

// Rethrows the current exception as a Python error that is marked as coming from a Function,
// because only the user's code has failed. Set when the module is loaded.
using RaiseAgain = void (*)(const std::string& name);
void set_raise_again(RaiseAgain raise_again);

}  // namespace torch_ort::run
