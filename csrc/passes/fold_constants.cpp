// A small tensor that does not depend on the inputs -> an initializer. Large tensors stay nodes,
// because filling memory is cheaper than holding it for the lifetime of the session. Declines if
// the tensor is returned or written, since all runs share an initializer.

#include "ir/edit.h"
#include "ops/op.h"
#include "ops/shapes.h"
#include "passes/context.h"
#include "passes/memory.h"

namespace torch_ort::passes {

namespace {

using Data = std::shared_ptr<const ir::TensorData>;

constexpr int64_t kLargest = 16;  // in elements

// Number of elements if the result is small, known, and on the CPU; -1 otherwise.
int64_t small_size(const ir::Value& value) {
  const ir::Type& type = value.type;
  if (!type.is_known() || !ir::is_host(type.device) || !ir::is_constant(*type.shape)) return -1;
  const int64_t size = ir::numel(*type.shape).constant();
  return size <= kLargest ? size : -1;
}

Data with_type(const ir::Type& type, std::vector<std::byte> bytes) {
  std::vector<int64_t> shape;
  for (const ir::Dim& dim : *type.shape) shape.push_back(dim.constant());
  return ir::make_tensor_data(type.dtype, std::move(shape), std::move(bytes));
}

Data fold_filled(const ir::Node& node, const ir::Type& type, int64_t size) {
  auto attr = node.attrs.find("value");
  const Data element = attr == node.attrs.end() ? ops::scalar_data(0.0, ir::DType::kFloat)
                                                : std::get<Data>(attr->second);
  if (element->dtype != type.dtype) return nullptr;
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < size; ++i) {
    bytes.insert(bytes.end(), element->bytes, element->bytes + element->num_bytes);
  }
  return with_type(type, std::move(bytes));
}

Data fold_range(const ir::Node& node, const ir::Type& type, int64_t size) {
  const std::optional<ops::Arg> start = ops::known_number(node.inputs[0]);
  const std::optional<ops::Arg> delta = ops::known_number(node.inputs[2]);
  if (!start || !delta || !std::holds_alternative<ir::Dim>(start->value)) return nullptr;
  const int64_t first = std::get<ir::Dim>(start->value).constant();
  const int64_t step = std::get<ir::Dim>(delta->value).constant();
  std::vector<std::byte> bytes;
  for (int64_t i = 0; i < size; ++i) {
    const Data number = ops::scalar_data(ops::Arg(first + i * step), type.dtype);
    if (number == nullptr) return nullptr;
    bytes.insert(bytes.end(), number->bytes, number->bytes + number->num_bytes);
  }
  return with_type(type, std::move(bytes));
}

// The data of a node if it can be computed now; nullptr otherwise.
Data fold(const ir::Node& node) {
  const ir::Value& result = *node.outputs[0];
  if (ir::is(&node, "Constant")) return ops::constant_data(result);
  const int64_t size = small_size(result);
  if (size < 0) return nullptr;
  if (ir::is(&node, "ConstantOfShape")) return fold_filled(node, result.type, size);
  if (ir::is(&node, "Range")) return fold_range(node, result.type, size);
  return nullptr;
}

}  // namespace

int fold_constants(ir::Graph& graph, PassContext& context) {
  const SharedMemory memory(graph);
  int rewrites = 0;
  for (ir::Node& node : graph.nodes) {
    if (node.is_erased() || node.outputs.size() != 1 || node.outputs[0] == nullptr) continue;
    ir::Value& result = *node.outputs[0];
    if (memory.leaves(&result) || memory.is_written(&result)) continue;
    const Data data = fold(node);
    if (data == nullptr || !context.may_rewrite()) continue;

    const std::string name = result.name;
    ir::Value& initializer = ir::add_initializer(graph, name, result.type, data);
    ir::replace_uses(result, initializer, graph);
    ir::erase(graph, node);
    ++rewrites;
  }
  return rewrites;
}

}  // namespace torch_ort::passes
