#include "convert/torchscript.h"

#include "base/error.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace torch_ort::convert {

namespace {

namespace jit = torch::jit;

std::vector<size_t> numbers_of(at::ArrayRef<const jit::Value*> values) {
  std::vector<size_t> numbers;
  numbers.reserve(values.size());
  for (const jit::Value* value : values) numbers.push_back(value->unique());
  return numbers;
}

// A module that was saved and loaded has two positions: in the text of the archive, and in the
// user's file.
void note_source(const jit::Node& node, ScriptStep& step) {
  jit::SourceRange range = node.sourceRange();
  if (auto original = range.findSourceRangeThatGenerated()) range = *original;
  if (!range.source()) return;
  step.text = std::string(range.token_text());
  if (const auto place = range.file_line_col()) {
    step.file = std::get<0>(*place);
    step.line = std::get<1>(*place);
  }
}

ScriptBlock read_block(const jit::Block& block);

ScriptStep read_node(const jit::Node& node) {
  ScriptStep step{.kind = node.kind().toQualString(), .node = &node};
  step.inputs = numbers_of(node.inputs());
  step.outputs = numbers_of(node.outputs());
  note_source(node, step);
  if (node.kind() == c10::prim::Constant) {
    if (!function_of(node)) {
      const auto value = jit::toIValue(node.output());
      ORT_CHECK(value.has_value(), "torchscript: a constant without a value");
      step.constant = *value;
    }
    return step;
  }
  if (node.hasAttribute(c10::attr::name) && node.kindOf(c10::attr::name) == jit::AttributeKind::s) {
    step.name = node.s(c10::attr::name);
  }
  if (const jit::Operator* op = node.maybeOperator()) {
    step.overload = op->schema().overload_name();
    step.is_operator = op->isC10Op();
  }
  for (const jit::Block* block : node.blocks()) step.blocks.push_back(read_block(*block));
  return step;
}

ScriptBlock read_block(const jit::Block& block) {
  ScriptBlock read;
  read.inputs = numbers_of(block.inputs());
  for (const jit::Node* node : block.nodes()) read.steps.push_back(read_node(*node));
  read.outputs = numbers_of(block.outputs());
  return read;
}

}  // namespace

jit::Function* function_of(const jit::Node& constant) {
  const auto type = constant.output()->type()->cast<c10::FunctionType>();
  return type ? type->function() : nullptr;
}

ScriptProgram read_script(jit::Function& function) {
  auto* graph_function = jit::tryToGraphFunction(function);
  if (!graph_function) {
    throw Unsupported(concat("TorchScript: function '", function.name(), "' has no graph"));
  }
  graph_function->ensure_defined();
  ScriptProgram program{.graph = graph_function->graph(), .body = {}};
  program.body = read_block(*program.graph->block());
  return program;
}

}  // namespace torch_ort::convert
