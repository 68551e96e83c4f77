// Reads TorchScript. The graph of a function becomes a program of plain steps, which Python replays
// under a trace. Calls are not inlined: modules of one type share a program, and the object on
// which a method is called decides which function runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::convert {

struct ScriptStep;

// Steps over numbered values. The blocks of an If or a Loop have inputs and outputs of their own.
struct ScriptBlock {
  std::vector<size_t> inputs;
  std::vector<ScriptStep> steps;
  std::vector<size_t> outputs;
};

struct ScriptStep {
  std::string kind;      // the kind of the node: "aten::add", "prim::If"
  std::string overload;  // "" is the default
  // Whether it is an operator of the dispatcher. All other steps work on plain values.
  bool is_operator = false;
  std::string name;  // of an attribute or a method
  std::vector<size_t> inputs, outputs;
  std::vector<ScriptBlock> blocks;
  c10::IValue constant;                    // of a prim::Constant that is not a function
  const torch::jit::Node* node = nullptr;  // lives as long as the program
  std::string file, text;                  // the user's source file, and the source text
  size_t line = 0;                         // 0: unknown
};

struct ScriptProgram {
  std::shared_ptr<torch::jit::Graph> graph;
  ScriptBlock body;
};

// Throws Unsupported for a function that has no graph.
ScriptProgram read_script(torch::jit::Function& function);

// The function that a constant node holds, which is the first input of a prim::CallFunction;
// nullptr if it holds none.
torch::jit::Function* function_of(const torch::jit::Node& constant);

}  // namespace torch_ort::convert
