// Reads TorchScript: the graph of a function becomes a program of plain steps, which Python replays
// under a trace. Nothing is inlined: modules of one type share a program, and the object that a
// call goes to says which function it means.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_ort::convert {

struct ScriptStep;

// Steps over numbered values. Blocks of If and Loop have inputs and outputs of their own.
struct ScriptBlock {
  std::vector<size_t> inputs;
  std::vector<ScriptStep> steps;
  std::vector<size_t> outputs;
};

struct ScriptStep {
  std::string kind;          // as TorchScript calls it: "aten::add", "prim::If"
  std::string overload;      // "" is the default
  bool is_operator = false;  // of the dispatcher; all else works on plain values
  std::string name;          // of an attribute or a method
  std::vector<size_t> inputs, outputs;
  std::vector<ScriptBlock> blocks;
  c10::IValue constant;                    // of prim::Constant, unless it is a function
  const torch::jit::Node* node = nullptr;  // alive as long as the program
  std::string file, text;                  // where the user wrote it, and the words there
  size_t line = 0;                         // 0: unknown
};

struct ScriptProgram {
  std::shared_ptr<torch::jit::Graph> graph;
  ScriptBlock body;
};

// Raises Unsupported for a function that has no graph.
ScriptProgram read_script(torch::jit::Function& function);

// The function that a constant or the first input of prim::CallFunction names; null if it is none.
torch::jit::Function* function_of(const torch::jit::Node& constant);

}  // namespace torch_ort::convert
