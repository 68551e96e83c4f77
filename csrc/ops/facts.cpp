// Facts of single nodes: registered ops answer from the registry, ATen nodes from their attributes.

#include "base/error.h"
#include "ops/op.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torch_ort::ops {

namespace {

bool is_aten(const ir::Node& node) { return ir::is(&node, "ATen", ir::kAtenDomain); }

bool touches(const ir::Node& node, ir::DType dtype) {
  const auto has_dtype = [&](const ir::Value* value) {
    return value != nullptr && value->type.dtype == dtype;
  };
  return std::any_of(node.inputs.begin(), node.inputs.end(), has_dtype) ||
         std::any_of(node.outputs.begin(), node.outputs.end(), has_dtype);
}

}  // namespace

bool is_pure(const ir::Node& node) {
  if (is_aten(node)) return ir::int_attr(node.attrs, "effects", 0) == 0;
  const Op* op = registry().find(node.op);
  // Nothing is known of Python code and of ops of other domains.
  if (op == nullptr) return false;
  return op->pure_of != nullptr ? op->pure_of(node) : op->pure;
}

bool may_write(const ir::Node& node) {
  if (is_aten(node)) return ir::int_attr(node.attrs, "writes", 0) != 0;
  return registry().find(node.op) == nullptr;
}

bool is_view(const ir::Node& node) {
  if (is_aten(node)) return ir::int_attr(node.attrs, "view", 0) != 0;
  const Op* op = registry().find(node.op);
  if (op == nullptr) return false;
  return op->view_of != nullptr ? op->view_of(node) : op->view;
}

const Work& work_of(const ir::Node& node) {
  static const Work none;
  if (is_aten(node)) {
    return registry().operator_row(ir::string_attr(node.attrs, "operator", "")).work;
  }
  const Op* op = registry().find(node.op);
  return op == nullptr ? none : op->work;
}

const KernelFacts& kernel_facts(const ir::Node& node) {
  static const KernelFacts none;
  const Op* op = registry().find(node.op);
  return op == nullptr ? none : op->kernel;
}

std::vector<int> row_list_inputs(const ir::Node& node) {
  const KernelFacts& facts = kernel_facts(node);
  const bool has_lists =
      facts.row_lists_if == nullptr || ir::int_attr(node.attrs, facts.row_lists_if, 0) != 0;
  std::vector<int> inputs(has_lists ? facts.row_lists : 0);
  std::iota(inputs.begin(), inputs.end(), static_cast<int>(node.inputs.size() - inputs.size()));
  return inputs;
}

// Standard ops that only files for other programs have (convert/spell_out.cpp), since their form
// that is written. The engine runs none of them.
constexpr std::pair<const char*, int> kOnlyInFiles[] = {
    {"EyeLike", 9}, {"GridSample", 20}, {"NonZero", 9}, {"TopK", 11}};

int first_opset(const ir::Node& node) {
  if (!node.op.domain.empty()) return 1;
  const Op* op = registry().find(node.op);
  for (const auto& [name, since] : kOnlyInFiles) {
    if (op == nullptr && node.op.name == name) return since;
  }
  if (op == nullptr) throw Unsupported(concat(node.op.str(), ": the engine has no such op"));
  const int since = op->since_of != nullptr ? op->since_of(node) : op->since;
  return touches(node, ir::DType::kBFloat16) ? std::max(since, op->bfloat16_since) : since;
}

std::vector<int> int_inputs(const ir::Node& node) {
  const Op* op = registry().find(node.op);
  if (op == nullptr) return {};
  return op->int_inputs_of != nullptr ? op->int_inputs_of(node) : op->int_inputs;
}

bool is_read_as_tensor(const ir::Value& value) {
  return std::any_of(value.uses.begin(), value.uses.end(), [](const ir::Use& use) {
    if (use.node == nullptr) return true;
    const std::vector<int> ints = int_inputs(*use.node);
    return std::find(ints.begin(), ints.end(), use.index) == ints.end();
  });
}

}  // namespace torch_ort::ops
